"""One node under a virtual clock: its storage without threads, the tiers behind it, the clients before it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import get_args
from unittest import mock

from kvframework.api.futures import Future
from kvframework.api.keys import PackedKey
from kvframework.api.requests import ClientInfo, Message
from kvframework.config.schema import WritePolicyName
from kvframework.service.engine_driven import Grants
from kvframework.service.keys import KeyResolver
from kvframework.service.lookups import Lookups
from kvframework.service.records import RequestLog
from kvframework.storage import manager
from kvframework.storage.l1.entries import ALIGNMENT
from kvframework.storage.l1.leases import INTERNAL_OWNER
from kvframework.storage.l2.sealed_tier import L2Store, Watermarks
from kvframework.storage.l2.writer import AttachedTier, TierWriter
from kvframework.storage.namespaces import NamespaceRecords
from tests.plan.simulation.dice import Dice
from tests.plan.simulation.jobs import Job, Turns
from tests.plan.simulation.model import Guard, Model, Writing, must
from tests.plan.simulation.prompts import PROMPTS
from tests.plan.simulation.tier import SimTier
from tests.plan.simulation.watched import SimMemory, WatchedBreaker, WatchedLru, WatchedTable, WatchedTiers


class Ledger:
    """Listens to the writer's queue from outside."""

    def __init__(self, writer: TierWriter, tier: SimTier) -> None:
        self.taken = 0
        self.written = 0
        self.entered = 0
        self._writer = writer
        self._tier = tier
        self._counters = writer.store.counters
        self._queue = writer._queue
        self._policy = writer._policy
        tier.told.clear()
        self._listen()

    def check(self) -> None:
        counters, pending = self._counters, self._writer.pending
        ended = self.written + counters["write_lost"] + counters["write_given_up"]
        if self._policy.name == "write_back":
            unwritten = len(self._policy._open)
            must(self.entered == ended + unwritten, f"{self.entered} entered, {ended} ended, {unwritten} unwritten")
        else:
            must(self.taken == ended + pending, f"{self.taken} taken on, {ended} ended, {pending} pending")
        records = counters["stored"] - self.written
        must(0 <= records <= self._tier.told["records"], "the tier was given more than is counted, or less")
        for counter, told in (("misses", "missing"), ("read_failed", "failed")):
            must(counters[counter] <= self._tier.told[told], f"{counter} is more than the tier told")

    def check_at_rest(self) -> None:
        self.check()
        for counter, told in (("misses", "missing"), ("read_failed", "failed")):
            must(self._counters[counter] == self._tier.told[told], f"{counter} is not what the tier told")

    def _listen(self) -> None:
        queue, policy, counters = self._queue, self._policy, self._counters
        offer, answered = queue.offer, queue.answered
        committed = policy.committed

        def offered(keys: Iterable[PackedKey]) -> None:
            keys = list(keys)
            fresh = len({key for key in keys if not queue.holds(key)})
            pending, dropped = queue.pending, counters["write_dropped"]
            offer(keys)
            taken = queue.pending - pending
            must(
                fresh == taken + counters["write_dropped"] - dropped, "something offered was neither taken nor dropped"
            )
            self.taken += taken

        def told(keys: Sequence[PackedKey], stored: Sequence[bool], now: float) -> None:
            answered(keys, stored, now)
            self.written += sum(stored)

        def on_commit(keys: Sequence[PackedKey]) -> Sequence[PackedKey]:
            if policy.name == "write_back":  # whose promotions count as commits
                self.entered += len(set(keys) - policy._open)
            return committed(keys)

        queue.offer, queue.answered = offered, told  # type: ignore[method-assign]
        policy.committed = on_commit  # type: ignore[method-assign]


UNITS = 36
CLIENTS = 4
TIMEOUT_S = 2.0
TICKET_S = 20.0


class Session(ClientInfo):
    pid = 1
    name = "simulated"
    local = True

    def __init__(self, session_id: int) -> None:
        self.session_id = session_id


@dataclass(eq=False)
class Client:
    """One engine process. `stopped`: it does nothing, and its leases go on without it."""

    session: Session
    stopped: bool = False
    writings: list[Writing] = field(default_factory=list)
    # By ticket: the request id, until when it lasts, and the prompt.
    tickets: dict[str, tuple[str, float, int]] = field(default_factory=dict)
    reads: list[Guard] = field(default_factory=list)
    requests: int = 0

    @property
    def owner(self) -> int:
        return self.session.session_id


class World:
    """What is the same for all actions of a script follows from `seed`; everything else from the actions."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.now = 1000.0
        self.counts: Counter[str] = Counter()
        self.dice = Dice(0)
        self._policies = [chance.choice(get_args(WritePolicyName)) for _ in range(2)]
        self._queues = [chance.choice([3, 12, 1000]) for _ in range(2)]
        self._promote = chance.random() < 0.8
        self._at_once = [(chance.choice([1, 2, 3]), chance.choice([1, 2, 3])) for _ in range(2)]
        capacity = chance.choice([None, 60_000])
        self.turns = Turns()
        self.tiers = [SimTier(0, None, self.clock, self.turns), SimTier(1, capacity, self.clock, self.turns)]
        self._sessions = 0
        self.boot()

    def clock(self) -> float:
        return self.now

    def boot(self) -> None:
        """A server, and clients that are new to it. What the tiers hold is there already."""
        for tier in self.tiers:
            tier.closed = False
        self.memory = SimMemory(UNITS * ALIGNMENT)
        self.model = Model([None] * UNITS, self.clock)
        self.policy = WatchedLru(self.model)
        records = NamespaceRecords()
        self.stores = [
            L2Store(
                tier,
                timeout_s=TIMEOUT_S,
                breaker=WatchedBreaker(),
                layout_of=records.layout_of,
                watermarks=Watermarks(0.9, 0.6),
                clock=self.clock,
            )
            for tier in self.tiers
        ]
        attached = [
            AttachedTier(store, policy, queue, self._promote, loads=loads, writes=writes)
            for store, policy, queue, (loads, writes) in zip(
                self.stores, self._policies, self._queues, self._at_once, strict=True
            )
        ]
        table = WatchedTable(
            self.model,
            self.turns,
            self.memory,
            self.policy,
            records=records,
            high_watermark=0.8,
            low_watermark=0.6,
            clock=self.clock,
        )
        with mock.patch.object(manager, "Tiers", partial(WatchedTiers, self.turns)):
            self.manager = manager.StorageManager(table, attached, threads=False)
        requests = RequestLog(self.clock)
        grants = Grants({}, self.manager, requests)
        self.lookups = Lookups(self.manager, KeyResolver(None), requests, grants, ticket_s=TICKET_S)  # type: ignore[arg-type]
        self.writers = self.manager.tiers.writers
        self.ledgers = [Ledger(writer, tier) for writer, tier in zip(self.writers, self.tiers, strict=True)]
        # Answers that are held back, and until when.
        self.held: list[tuple[Future[Message], float]] = []
        self.jobs: list[Job] = []
        self.copies = Client(Session(INTERNAL_OWNER))
        self.clients = [self.fresh_client() for _ in range(CLIENTS)]
        self.errors: list[str] = []

    def fresh_client(self) -> Client:
        self._sessions += 1
        return Client(Session(self._sessions))

    def use(self, dice: Dice) -> None:
        """All chance of the next action comes from `dice`."""
        self.dice = dice
        for tier in self.tiers:
            tier.dice = dice

    def prompt(self) -> int:
        return self.dice.pick(PROMPTS)

    def poll(self, number: int) -> bool:
        """Gives one of a controller's threads something to do, if one has time and there is something."""
        controller, threads = self.manager.tiers.controllers[number]
        if sum(job.controller is controller for job in self.jobs) >= threads:
            return False
        work = controller.poll()
        if work is None:
            return False
        self.jobs.append(Job(controller, work, self.turns))
        return True

    def drive(self, job: Job) -> bool:
        """One more step of a job, or its answer, unless it has to wait. Some take far longer than others."""
        if job.delay:
            job.delay -= 1
            return False
        if self.dice.chance(3):
            job.delay = self.dice.of([4, 16, 40])
        job.go_on()
        if job.ended:
            self.jobs.remove(job)
        return True

    def serve(self) -> None:
        if self.lookups.waits.next_at() <= self.now:
            self.lookups.answer_waits()

    def rest(self) -> None:
        """Lets the storage threads go on until nothing is left to do, with tiers that are well again."""
        for tier in self.tiers:
            tier.mode = "well"
        for _ in range(5000):
            moved = sum(self.drive(job) for job in list(self.jobs))
            moved += sum(self.poll(number) for number in range(len(self.manager.tiers.controllers)))
            self.serve()
            if not moved:
                if not self.jobs and self.idle:
                    return
                self.now += 0.25
                self.tick()
        must(False, f"it never came to rest: {[job.due for job in self.jobs]}, {self.manager.status()['l2']}")

    @property
    def idle(self) -> bool:
        pending = sum(writer.pending for writer in self.writers)
        broken = any(store.state != "closed" for store in self.stores)
        return not pending and not broken and not self.manager.tiers._prefetcher.in_flight

    def tick(self) -> None:
        self.serve()
        self.lookups.tickets.expire()
        self.manager.table.tick()

    def abandon(self) -> None:
        """kill -9. What was on its way to a tier may have come there all the same."""
        for job in self.jobs:
            if " of " in job.due and self.dice.chance(30):
                job.go_on()
            job.abandon()
