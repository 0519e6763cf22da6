"""The storage under test, watched where its callers meet it: everything that L1 hands out, takes back, says and drops
is held against the model."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvframework.api.layout import MemoryLayoutDesc
from kvframework.api.requests import PackedKey, Select
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l1.leases import INTERNAL_OWNER, NO_DEADLINE, NO_PROMPT, PinLease, PromptPart, Reservation
from kvframework.storage.l2.loading import LoadTask, Located
from kvframework.storage.l2.tier_calls import Breaker
from kvframework.storage.l2.tiers import Tiers
from kvframework.storage.table import Table
from tests.core.storage.memory import OrderedLru, PlainMemory
from tests.plan.simulation.jobs import Turns
from tests.plan.simulation.model import Guard, Model, Writing, must
from tests.plan.simulation.prompts import CONTENT

UNWRITTEN = b"\xee"


class SimMemory(PlainMemory):
    """Becomes ready by and by."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.grow: Callable[[int], None] = lambda _limit: None

    def start(self, on_ready: Callable[[int], None]) -> None:
        self.grow = on_ready
        on_ready(self.capacity * 2 // 3)

    def bytes_at(self, offset: int, nbytes: int) -> bytearray:
        return self._bytes[offset : offset + nbytes]

    def fill(self, offset: int, data: bytes) -> None:
        self._bytes[offset : offset + len(data)] = data


class WatchedLru(OrderedLru):
    """The eviction policy is told of every object that leaves, at once."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model

    def on_remove(self, key: PackedKey) -> None:
        super().on_remove(key)
        self._model.removed(key)


class WatchedTable(Table):
    def __init__(self, model: Model, turns: Turns, memory: SimMemory, *arguments: Any, **named: Any) -> None:
        self.model = model
        self.turns = turns
        self.bytes = memory
        self._numbers = itertools.count()
        # The pins of the server itself, by object.
        self.holds: defaultdict[StoredObject, list[Guard]] = defaultdict(list)
        super().__init__(memory, *arguments, **named)

    def reserve(
        self,
        items: Sequence[tuple[PackedKey, int]],
        *,
        owner: int,
        request_id: str = "",
        lease_s: float | None = None,
        **bounds: Any,
    ) -> Reservation:
        result = super().reserve(items, owner=owner, request_id=request_id, lease_s=lease_s, **bounds)
        counted = len(result.placed) + result.present + result.in_flight + result.dropped
        must(counted == len(items), "a reservation does not account for every object")
        if result.lease is not None:
            placed = [(items[index][0], offset, items[index][1]) for index, offset in result.placed]
            deadline = NO_DEADLINE if lease_s is None else self.clock() + lease_s
            writing = Writing(result.lease.id, owner, request_id, deadline, placed, list(placed))
            self.model.handed_out(writing)
            for _, offset, nbytes in placed:
                self.bytes.fill(offset, UNWRITTEN * nbytes)
        return result

    def which_present(self, keys: Sequence[PackedKey]) -> list[bool]:
        return self.turns.step("which_present", super().which_present, keys)

    def pin_present(self, keys: Sequence[PackedKey]) -> list[StoredObject]:
        return self.turns.step("pin_present", super().pin_present, keys)

    def reserve_load(
        self, key: PackedKey, nbytes: int, prompt: PromptPart, client: int
    ) -> tuple[str, memoryview] | None:
        return self.turns.step("reserve_load", super().reserve_load, key, nbytes, prompt, client)

    def commit(self, lease_id: str, *, owner: int) -> list[StoredObject]:
        writing = self.model.writings.get(lease_id)
        published = super().commit(lease_id, owner=owner)
        must(published or writing.cancelled or self.clock() >= writing.deadline, "a lease that held was not published")
        self.model.ended(writing, len(published))
        return published

    def abort(self, lease_id: str, *, owner: int) -> int:
        freed = super().abort(lease_id, owner=owner)
        self.model.ended(self.model.writings[lease_id], 0)
        return freed

    def finish_load(self, lease_id: str, good: bool) -> list[StoredObject]:
        if good:
            self.model.writings[lease_id].unwritten = []
        return super().finish_load(lease_id, good)

    def pin(self, keys: Sequence[PackedKey], **named: Any) -> PinLease | None:
        lease = super().pin(keys, **named)
        must((lease is None) != all(key in self.model.objects for key in keys), "a pin says hit or miss wrongly")
        return lease

    def pin_objects(self, objects: list[StoredObject], **named: Any) -> PinLease:
        lease = super().pin_objects(objects, **named)
        self._guard(Guard(lease.id, lease.owner, lease.request_id, lease.deadline, []), lease.objects)
        return lease

    def unpin(self, lease_id: str, **named: Any) -> PinLease:
        lease = super().unpin(lease_id, **named)
        self._unguard(lease.id)
        return lease

    def _lapse(self, lease: PinLease) -> None:
        super()._lapse(lease)
        must(self.clock() >= self.model.unpinned(lease.id).deadline, "a pin lapsed before its time")

    def cancel(self, owner: int, request_id: str | None = None) -> int:
        ended = super().cancel(owner, request_id)
        self.model.cancel(owner, request_id)
        return ended

    def end_owner(self, owner: int) -> int:
        ended = super().end_owner(owner)
        self.model.end_owner(owner)
        return ended

    def check_bytes(self, key: PackedKey, offset: int, nbytes: int) -> None:
        must(self.bytes.bytes_at(offset, nbytes) == CONTENT[key], "what can be read is not what was stored")

    def hold(self, keys: Sequence[PackedKey]) -> list[StoredObject]:
        here = super().hold(keys)
        for stored in here:
            guard = Guard(f"hold-{next(self._numbers)}", INTERNAL_OWNER, "", NO_DEADLINE, [])
            self._guard(guard, [stored])
            self.holds[stored].append(guard)
        return here

    def let_go(self, objects: Sequence[StoredObject]) -> None:
        super().let_go(objects)
        for stored in objects:
            must(self.holds[stored], "a pin went on after its end")
            self._unguard(self.holds[stored].pop().id)

    def _guard(self, guard: Guard, objects: Sequence[StoredObject]) -> None:
        for stored in objects:
            must(self.model.objects.get(stored.key) == (stored.offset, stored.length), "a pin names another place")
            self.check_bytes(stored.key, stored.offset, stored.length)
            guard.keys.append(stored.key)
        self.model.pinned(guard)

    def _unguard(self, lease_id: str) -> None:
        guard = self.model.unpinned(lease_id)
        must(not guard.broken, "a pin is said to have held, and did not")
        must(self.clock() < guard.deadline, "a pin's deadline was not honoured")


class WatchedTiers(Tiers):
    """`accepted` counts how often the `on_done` of each accepted load has run."""

    def __init__(self, turns: Turns, *arguments: Any, **named: Any) -> None:
        self.turns = turns
        self.accepted: dict[object, int] = {}
        super().__init__(*arguments, **named)

    def submit_prefetch_task(
        self,
        keys: Sequence[PackedKey],
        layout_desc: MemoryLayoutDesc,
        *,
        select: Select | None = None,
        on_done: Callable[[], None] = lambda: None,
        on_change: Callable[[], object] = lambda: None,
        located: Located | None = None,
        prompt: PromptPart = NO_PROMPT,
        client: int = 0,
        ahead: bool = False,
    ) -> LoadTask | None:
        load, told = self._once(on_done)
        task = super().submit_prefetch_task(
            keys,
            layout_desc,
            select=select,
            on_done=told,
            on_change=on_change,
            located=located and partial(self.turns.step, "located", located),
            prompt=prompt,
            client=client,
            ahead=ahead,
        )
        if task is not None:
            self.accepted[load] = 0
        return task

    def submit_record_task(self, namespace: bytes, on_done: Callable[[], None]) -> bool:
        load, told = self._once(on_done)
        accepted = super().submit_record_task(namespace, told)
        if accepted:
            self.accepted[load] = 0
        return accepted

    def _once(self, on_done: Callable[[], None]) -> tuple[object, Callable[[], None]]:
        load = object()

        def told() -> None:
            self.accepted[load] += 1
            must(self.accepted[load] == 1, "on_done ran twice")
            on_done()

        return load, partial(self.turns.step, "on_done", told)


class WatchedBreaker(Breaker):
    """Held against the words of its contract."""

    THRESHOLD, BACKOFF_S, MAX_BACKOFF_S = 3, 0.25, 4.0

    def __init__(self) -> None:
        super().__init__(self.THRESHOLD, self.BACKOFF_S, self.MAX_BACKOFF_S)
        self._under_way: Counter[int] = Counter()
        self._in_a_row = 0
        self._opened_at = 0.0

    def __copy__(self) -> WatchedBreaker:
        return WatchedBreaker()

    def allow(self, now: float) -> int | None:
        before = self.state
        call = super().allow(now)
        if call is None:
            must(before != "closed", "a closed circuit refused a call")
            probing = self._under_way[self._openings] > 0
            must(probing or now < self._opened_at + self.MAX_BACKOFF_S, "an open circuit never lets a call through")
            return None
        if before != "closed":
            must(now >= self._opened_at + self.BACKOFF_S, "an open circuit let a call through")
            must(not self._under_way[call], "two probes at once")
        self._under_way[call] += 1
        return call

    def succeeded(self, call: int, now: float) -> None:
        before, current = self.state, call == self._openings
        super().succeeded(call, now)
        self._under_way[call] -= 1
        must(self.state == ("closed" if current else before), f"a call worked, and the circuit is {self.state}")
        if current:
            self._in_a_row = 0

    def undecided(self, call: int) -> None:
        super().undecided(call)
        self._under_way[call] -= 1

    def failed(self, call: int, now: float) -> None:
        before, current = self.state, call == self._openings
        super().failed(call, now)
        self._under_way[call] -= 1
        must(current or self.state == before, "a call from before the circuit opened changed it")
        if current:
            self._in_a_row += 1
            opens = before == "half-open" or self._in_a_row >= self.THRESHOLD
            must((self.state == "open") == opens, f"{self._in_a_row} failures, and the circuit is {self.state}")
            if opens:
                self._opened_at = now
                self._in_a_row = 0
