"""What is stored, from the step that computes a chunk to its commit.

The server is asked for places when the step is planned, and nobody waits for them: the workers get the store with the
next step's plan, whose blocks are complete by then. So a store ends within a step or two of its chunk.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash

from kvf_vllm.offloading.messages import NOWHERE, ArenaPlaces
from kvf_vllm.offloading.searches import ANSWER_S

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob

    from kvf_vllm.events import BlocksRemoved, BlocksStored
    from kvf_vllm.offloading.tracked import Engine, Tracked
    from kvf_vllm.requests import Wish
    from kvframework.api.futures import Future
    from kvframework.api.transport import StoreOutcome, StorePlan

# How long an idle engine steps on to hear of stores that a reset has cut off.
FORGOTTEN_S = 60.0


@dataclass(eq=False)
class Store:
    """A store under way: the plan that the server makes of it, its keys by group, and the workers that have not ended
    it. `wish` is that of its request at the time: a request that is left out later has another one."""

    planning: Future[StorePlan]
    keys: list[tuple[int, int]]
    places: ArenaPlaces
    workers: int
    tracked: Tracked
    wish: Wish
    event: BlocksStored | None = None
    plan: StorePlan | None = None
    is_doomed: bool = False


class Stores:
    """For the scheduler's thread. `numbers` are shared with loads."""

    def __init__(self, engine: Engine, numbers: itertools.count[int]) -> None:
        self._engine = engine
        self._numbers = numbers
        self._under_way: dict[int, Store] = {}
        # vLLM's jobs that the workers have not been given yet.
        self._held: dict[int, TransferJob] = {}
        self._committing: list[tuple[Future[StoreOutcome], BlocksStored]] = []
        self._asked_until = 0.0

    def begin(self, tracked: Tracked, keys: Collection[OffloadKey]) -> tuple[list[OffloadKey], ArenaPlaces]:
        """Ask for places for these chunks of a request. Returns those of them that are stored, and their places to
        be."""
        engine = self._engine
        ordered: list[OffloadKey] = []
        counted: list[tuple[int, int]] = []
        groups, main_ends = [], []
        for place, mine in enumerate(engine.by_group(tracked, list(keys))):
            ends = [tracked.ends[key] for key in mine]
            groups.append(engine.keys(tracked, engine.groups[place], list(map(get_offload_block_hash, mine)), ends))
            counted += [(place, index) for index in range(len(mine))]
            ordered += mine
            if place == engine.main:
                main_ends = ends
        if not ordered or engine.instance is None:
            return [], ArenaPlaces(0)
        unit = engine.tail or engine.unit
        end = -(-max(tracked.ends[key] for key in ordered) // unit) * unit
        ticket, number = engine.instance.ticket, next(self._numbers)
        # Beyond its lease a place is still this engine's to write, though never published.
        session = ticket.session if ticket is not None else b""
        places = ArenaPlaces(number, [NOWHERE] * len(ordered), session, math.inf)
        chunk, event = engine.groups[engine.main].tokens, None
        places.tokens = len(main_ends) * chunk
        if main_ends and not end % engine.unit and max(main_ends) - min(main_ends) + chunk == places.tokens:
            event = engine.events.of(tracked.request, tracked.wish, min(main_ends) - chunk, max(main_ends))
        planning = engine.instance.prepare_store(engine.prompt(tracked, 0, end), groups)
        self._under_way[number] = Store(
            planning, counted, places, engine.workers, tracked, tracked.wish, event, is_doomed=False
        )
        return ordered, places

    def give_out(self, planned: Mapping[int, TransferJob], flushed: Collection[int]) -> dict[int, TransferJob]:
        """Keep the jobs that a step has planned, which is still to compute their blocks, and return those of earlier
        steps whose places are known by now. Jobs whose blocks are given away in this very step (`flushed`) were
        computed before: their answer is waited for, since it is on its way."""
        ready: dict[int, TransferJob] = {}
        if not (planned or self._held):
            return ready
        until = time.monotonic() + ANSWER_S
        candidates = [*self._held, *(planned.keys() & flushed)]
        self._held.update(planned)
        for job_id in candidates:
            store = self._under_way.get(self._held[job_id].dst_spec.number)
            if store is not None and not store.planning.query() and job_id not in flushed:
                continue
            if store is not None:
                self._place(store, max(until - time.monotonic(), 0.0))
            ready[job_id] = self._held.pop(job_id)
        return ready

    def ended(self, ended: Counter[int], failed: Collection[int]) -> None:
        """Workers have ended their part of these stores, of which some have `failed`."""
        for number in failed:
            if number in self._under_way:
                self._under_way[number].is_doomed = True
        for number, workers in ended.items():
            store = self._under_way.get(number)
            if store is None:
                continue
            store.workers -= workers
            if store.workers <= 0:
                del self._under_way[number]
                self._end(store)

    @property
    def are_open(self) -> bool:
        """Whether the server is still to answer, or the workers about jobs that vLLM has forgotten."""
        return bool(self._committing) or (bool(self._under_way) and time.monotonic() < self._asked_until)

    def doom(self) -> None:
        """Publish nothing of what is under way."""
        for store in self._under_way.values():
            store.is_doomed = True

    def forget(self) -> None:
        """vLLM forgets its jobs: the workers never hear of those that they have not been given. Others they end."""
        for job in self._held.values():
            if store := self._under_way.pop(job.dst_spec.number, None):
                self._end(store)
        self._held.clear()
        self._asked_until = time.monotonic() + FORGOTTEN_S

    def announcements(self) -> list[BlocksStored | BlocksRemoved]:
        """Return the events since the last call."""
        committing, self._committing = self._committing, []
        for ended, event in committing:
            if not ended.query():
                self._committing.append((ended, event))
            elif ended.exception() is None and not ended.result(0).dropped:
                self._engine.events.stored(event)
        return self._engine.events.take()

    def announce_none(self) -> None:
        self._committing.clear()

    def _place(self, store: Store, wait_s: float) -> None:
        try:
            plan = store.plan = store.planning.result(wait_s)
        except Exception as error:  # noqa: BLE001 - of whatever kind, nothing is stored
            store.planning.cancel()
            self._engine.failed("a store", error)
            return
        placed = {(place.group, place.chunk): place.offset for place in plan.ranges}
        store.places.offsets[:] = [placed.get(each, NOWHERE) for each in store.keys]

    def _end(self, store: Store) -> None:
        plan, engine = store.plan, self._engine
        if plan is None:
            store.planning.cancel()
        elif (
            store.is_doomed
            or store.wish is not store.tracked.wish
            or engine.is_spoiled(store.tracked)
            or engine.adapters.lacks(store.tracked)
        ):
            plan.abort()
        else:
            committing: Future[Any] = plan.commit()
            if store.event is not None:
                self._committing.append((committing, store.event))
