"""The object table against a model: hypothesis drives both, and simulated writers leave marks in a simulated arena."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvframework.api.keys import PackedKey
from kvframework.errors import LeaseUnknown
from kvframework.storage.l1.entries import ALIGNMENT, StoredObject, rounded
from kvframework.storage.l1.eviction_statistics import Cause
from kvframework.storage.l1.leases import INTERNAL_OWNER, NO_DEADLINE
from kvframework.storage.l1.objects import ObjectTable
from tests.core.storage.memory import OrderedLru, packed_key

UNITS = 14
KEYS = [packed_key(number) for number in range(12)]
SIZES = [1, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT, 5 * ALIGNMENT, (UNITS + 1) * ALIGNMENT]
owners = st.sampled_from([INTERNAL_OWNER, 1, 2])
requests = st.sampled_from(["a", "b"])
deadlines = st.sampled_from([1.0, 3.0, NO_DEADLINE])
items_of = st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(SIZES)), max_size=5)
picks = st.integers(0, 1 << 16)


@dataclass
class Writer:
    """A lease as its holder sees it. It may write into its ranges until it has said COMMIT or ABORT, or is dead."""

    id: str
    owner: int
    request_id: str
    deadline: float
    items: list[tuple[PackedKey, int, int]]
    present: list[PackedKey]
    quarantined: bool = False


@dataclass
class Reader:
    id: str
    owner: int
    request_id: str
    deadline: float
    keys: list[PackedKey]


@dataclass
class Placed:
    offset: int
    length: int
    written_by: str
    stored: StoredObject
    pins: int = 0


@dataclass
class Model:
    objects: dict[PackedKey, Placed] = field(default_factory=dict)
    writers: dict[str, Writer] = field(default_factory=dict)
    readers: dict[str, Reader] = field(default_factory=dict)

    @property
    def writing(self) -> set[PackedKey]:
        return {key for lease in self.writers.values() if not lease.quarantined for key, _, _ in lease.items}

    def let_go(self, lease: Writer) -> None:
        """The lease can be committed no more: what it found there is pinned by it no longer."""
        for key in lease.present:
            self.objects[key].pins -= 1
        lease.present = []

    def end_writer(self, lease_id: str) -> None:
        self.let_go(self.writers.pop(lease_id))

    def quarantine(self, lease: Writer) -> None:
        lease.quarantined = True
        self.let_go(lease)

    def end_reader(self, lease_id: str) -> None:
        for key in self.readers.pop(lease_id).keys:
            self.objects[key].pins -= 1


class ObjectTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = OrderedLru()
        self.now = 0.0
        self.table = ObjectTable(self.policy, nbytes=UNITS // 2 * ALIGNMENT, clock=lambda: self.now)
        self.model = Model()
        self.remembered: list[StoredObject] = []
        # What each unit of the arena holds: the id of the lease that wrote there last.
        self.arena = [""] * UNITS

    def mark(self, lease: Writer) -> None:
        for _, offset, length in lease.items:
            for unit in range(offset // ALIGNMENT, (offset + rounded(length)) // ALIGNMENT):
                self.arena[unit] = lease.id

    def pick_writer(self, number: int) -> Writer:
        return list(self.model.writers.values())[number % len(self.model.writers)]

    def pick_reader(self, number: int) -> Reader:
        return list(self.model.readers.values())[number % len(self.model.readers)]

    def note_evictions(self, kept: set[PackedKey]) -> bool:
        """Takes over what the table evicted; only what was neither pinned nor in `kept` may be gone."""
        gone = [key for key in self.model.objects if key not in self.table]
        for key in gone:
            assert self.model.objects[key].pins == 0
            assert key not in kept
            del self.model.objects[key]
        return bool(gone)

    @rule(items=items_of, owner=owners, request_id=requests, lease_s=deadlines)
    def reserve(self, items: list[tuple[PackedKey, int]], owner: int, request_id: str, lease_s: float) -> None:
        model, allocator = self.model, self.table.allocator
        here, writing = set(model.objects), model.writing
        new = {key: size for key, size in reversed(items) if key not in here and key not in writing}
        roomy = allocator.largest_free >= sum(map(rounded, new.values()))
        deadline = self.now + lease_s
        result = self.table.reserve(items, owner=owner, request_id=request_id, lease_s=lease_s)

        evicted = self.note_evictions(kept={key for key, _ in items})
        placed = dict(result.placed)
        present = in_flight = dropped = refused = 0
        for index, (key, size) in enumerate(items):
            if key in here:
                present += 1
            elif key in writing:
                in_flight += 1
            elif index in placed:
                assert not dropped, "a chunk behind a gap was placed"
                writing.add(key)
            else:
                refused = refused or rounded(size)
                dropped += 1
        assert (result.present, result.in_flight, result.dropped) == (present, in_flight, dropped)
        if roomy:
            assert not evicted, "evicted though there was room"
            assert not dropped
        assert (result.lease is None) == (not placed)
        if result.lease is not None:
            ranges = [(items[index][0], offset, items[index][1]) for index, offset in result.placed]
            assert result.lease.items == ranges
            found = [key for key, _ in items if key in here]
            lease = Writer(result.lease.id, owner, request_id, deadline, ranges, found)
            for key in found:
                model.objects[key].pins += 1
            model.writers[lease.id] = lease
            self.mark(lease)
        if refused:
            assert refused > self.widest_window(set(dict(items))), "dropped though it could have been placed"

    def widest_window(self, kept: set[PackedKey]) -> int:
        """Contiguous bytes that are free, or would be if all that is neither pinned nor in `kept` left."""
        stays = [True] * UNITS
        for unit in range(self.table.allocator.limit // ALIGNMENT):
            stays[unit] = False
        ranges = [(at, size) for lease in self.model.writers.values() for _, at, size in lease.items]
        ranges += [(p.offset, p.length) for key, p in self.model.objects.items() if p.pins or key in kept]
        for offset, length in ranges:
            for unit in range(offset // ALIGNMENT, (offset + rounded(length)) // ALIGNMENT):
                stays[unit] = True
        runs = [len(list(run)) for stuck, run in groupby(stays) if not stuck]
        return max(runs, default=0) * ALIGNMENT

    @precondition(lambda self: self.model.writers)
    @rule(number=picks)
    def write_again(self, number: int) -> None:
        """A writer that is alive may write at any time, in time or late."""
        self.mark(self.pick_writer(number))

    @precondition(lambda self: self.model.writers)
    @rule(number=picks)
    def commit(self, number: int) -> None:
        lease = self.pick_writer(number)
        late = lease.quarantined or self.now >= lease.deadline
        published = self.table.commit(lease.id, owner=lease.owner)
        self.model.end_writer(lease.id)
        if late:
            assert published == []
            return
        assert [(stored.key, stored.offset, stored.length) for stored in published] == lease.items
        for (key, offset, length), stored in zip(lease.items, published, strict=True):
            self.model.objects[key] = Placed(offset, length, lease.id, stored)

    @precondition(lambda self: self.model.writers)
    @rule(number=picks)
    def abort(self, number: int) -> None:
        lease = self.pick_writer(number)
        assert self.table.abort(lease.id, owner=lease.owner) == len(lease.items)
        self.model.end_writer(lease.id)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4), owner=owners, request_id=requests, lease_s=deadlines)
    def pin(self, keys: list[PackedKey], owner: int, request_id: str, lease_s: float) -> None:
        lease = self.table.pin(keys, owner=owner, request_id=request_id, lease_s=lease_s)
        assert (lease is not None) == all(key in self.model.objects for key in keys)
        if lease is not None:
            self.model.readers[lease.id] = Reader(lease.id, owner, request_id, self.now + lease_s, keys)
            for key, stored in zip(keys, lease.objects, strict=True):
                placed = self.model.objects[key]
                placed.pins += 1
                assert (stored.key, stored.offset, stored.length) == (key, placed.offset, placed.length)

    @precondition(lambda self: self.model.readers)
    @rule(number=picks)
    def unpin(self, number: int) -> None:
        lease = self.pick_reader(number)
        with nullcontext() if self.now < lease.deadline else pytest.raises(LeaseUnknown):
            self.table.unpin(lease.id, owner=lease.owner)
        self.model.end_reader(lease.id)

    @rule()
    def a_stranger_asks(self) -> None:
        """Whoever does not own a lease, or names none, changes nothing."""
        for lease_id in ("", "gone", *self.model.writers, *self.model.readers):
            with pytest.raises(LeaseUnknown):
                self.table.commit(lease_id, owner=9)
            with pytest.raises(LeaseUnknown):
                self.table.abort(lease_id, owner=9)
            with pytest.raises(LeaseUnknown):
                self.table.unpin(lease_id, owner=9)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.table.expire()
        for writer in self.model.writers.values():
            if self.now >= writer.deadline:
                self.model.quarantine(writer)
        for reader in list(self.model.readers.values()):
            if self.now >= reader.deadline:
                self.model.end_reader(reader.id)

    @rule(owner=owners, request_id=st.one_of(st.none(), requests))
    def cancel(self, owner: int, request_id: str | None) -> None:
        """The owner lives: what it may still be writing stays taken, and is published no more."""
        writers = [w for w in self.model.writers.values() if w.owner == owner and request_id in (None, w.request_id)]
        readers = [r for r in self.model.readers.values() if r.owner == owner and request_id in (None, r.request_id)]
        fresh = [writer for writer in writers if not writer.quarantined]
        assert self.table.cancel(owner, request_id) == len(fresh) + len(readers)
        for writer in fresh:
            self.model.quarantine(writer)
        for reader in readers:
            self.model.end_reader(reader.id)

    @rule(owner=owners)
    def end_owner(self, owner: int) -> None:
        leases: list[Writer | Reader] = [*self.model.writers.values(), *self.model.readers.values()]
        ending = [lease for lease in leases if lease.owner == owner]
        assert self.table.end_owner(owner) == len(ending)
        for lease in ending:
            if isinstance(lease, Writer):
                self.model.end_writer(lease.id)
            else:
                self.model.end_reader(lease.id)

    @rule()
    def remember_all(self) -> None:
        """CLEAR has begun."""
        self.remembered = self.table.objects()
        assert {stored.key for stored in self.remembered} == self.model.objects.keys()

    @rule(count=st.integers(1, 20))
    def clear(self, count: int) -> None:
        """A part of what was there when CLEAR began; what was stored since stays, also under the same name."""
        part, self.remembered = self.remembered[:count], self.remembered[count:]
        same = [key for key, placed in self.model.objects.items() if placed.stored in part]
        unused = {key for key in same if not self.model.objects[key].pins}
        dropped, in_use = self.table.drop_unused(part)
        assert {stored.key for stored in dropped} == unused
        assert in_use == len(same) - len(unused)
        for key in unused:
            del self.model.objects[key]

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key: PackedKey) -> None:
        placed = self.model.objects.get(key)
        droppable = placed is not None and not placed.pins
        assert self.table.drop([key]) == droppable
        if droppable:
            del self.model.objects[key]

    @rule(units=st.integers(0, UNITS))
    def evict_down_to(self, units: int) -> None:
        order = [key for key in self.policy.order if not self.model.objects[key].pins]
        self.table.drop(self.table.candidates(units * ALIGNMENT), Cause.WATERMARK)
        gone = {key for key in self.model.objects if key not in self.table}
        assert gone == set(order[: len(gone)]), "not the best victims"
        self.note_evictions(kept=set())
        left = [placed for placed in self.model.objects.values() if not placed.pins]
        assert self.table.used_bytes <= units * ALIGNMENT or not left

    @rule(units=st.integers(0, UNITS))
    def grow(self, units: int) -> None:
        self.table.allocator.grow(units * ALIGNMENT)

    @invariant()
    def every_byte_has_one_use(self) -> None:
        ranges = [(placed.offset, rounded(placed.length)) for placed in self.model.objects.values()]
        ranges += [(at, rounded(size)) for lease in self.model.writers.values() for _, at, size in lease.items]
        used = sum(length for _, length in ranges)
        end = 0
        for offset, length in sorted(ranges):
            assert offset >= end, "ranges overlap"
            end = offset + length
        allocator = self.table.allocator
        assert end <= allocator.limit
        assert self.table.used_bytes == used
        assert used + allocator.free_bytes == allocator.limit

    @invariant()
    def only_what_was_committed_is_readable_and_it_is_what_was_written(self) -> None:
        assert len(self.table) == len(self.model.objects)
        for key in KEYS:
            assert (key in self.table) == (key in self.model.objects)
            assert self.table.any_writing([key]) == (key in self.model.writing)
        for placed in self.model.objects.values():
            units = range(placed.offset // ALIGNMENT, (placed.offset + rounded(placed.length)) // ALIGNMENT)
            assert {self.arena[unit] for unit in units} == {placed.written_by}
        assert self.policy.order.keys() == self.model.objects.keys()

    @invariant()
    def counters_are_true(self) -> None:
        model, table = self.model, self.table
        assert table.pins == sum(placed.pins for placed in model.objects.values())
        assert table.write_leases == len(model.writers)
        assert table.pin_leases == len(model.readers)
        quarantined = [lease for lease in model.writers.values() if lease.quarantined]
        assert table.quarantined_bytes == sum(rounded(size) for lease in quarantined for _, _, size in lease.items)

    def teardown(self) -> None:
        for owner in (INTERNAL_OWNER, 1, 2):
            self.table.end_owner(owner)
        assert self.table.drop_unused(self.table.objects())[1] == 0
        table, allocator = self.table, self.table.allocator
        assert (len(table), table.used_bytes, table.quarantined_bytes, table.pins) == (0, 0, 0, 0)
        assert (table.write_leases, table.pin_leases) == (0, 0)
        assert allocator.free_bytes == allocator.largest_free == allocator.limit
        assert not table.any_writing(KEYS)


TestObjectTable = ObjectTableMachine.TestCase
TestObjectTable.settings = settings(max_examples=100, stateful_step_count=50)
