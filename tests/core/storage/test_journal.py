"""The journal of L1: what a next server reads from it, at whatever moment this one ends, and whatever became of it."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframework.storage.l1 import journal as journal_module
from kvframework.storage.l1.entries import ALIGNMENT, rounded
from kvframework.storage.l1.eviction import Tenant
from kvframework.storage.l1.journal import Cold, FoundSlots, Identity, Journal
from kvframework.storage.l1.leases import INTERNAL_OWNER
from kvframework.storage.namespaces import RECORD_BYTES
from tests.core.storage.memory import ClockedTable, OrderedLru, packed_key

UNITS = 14
CAPACITY = UNITS * ALIGNMENT
KEYS = [packed_key(number) for number in range(12)]
SIZES = [1, ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT]
IDENTITY = Identity(256, "hasher", "pinned", "{}", (1, 2), "machine")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "GROW_SLOTS", 4)


@pytest.fixture
def journal() -> Iterator[Journal]:
    made = Journal.create(IDENTITY)
    yield made
    made.close()


def table_of(journal: Journal) -> ClockedTable:
    return ClockedTable(OrderedLru(), nbytes=CAPACITY, journal=journal)


def store(table: ClockedTable, *numbers: int, owner: int = 1, now: float = 1.0, commit: bool = True) -> str:
    items = [(KEYS[number], ALIGNMENT) for number in numbers]
    lease = table.reserve(items, owner=owner, request_id="r").lease
    assert lease is not None
    if commit:
        table.now = now
        table.commit(lease.id, owner=owner)
    return lease.id


def objects_of(found: FoundSlots) -> dict[bytes, tuple[int, int]]:
    return {each.key: (each.offset, each.length) for each in found.objects}


def slots_of(journal: Journal) -> FoundSlots:
    return journal_module.read_slots(journal.memory[journal_module.SLOTS_AT :], CAPACITY)


def objects_in(table: ClockedTable) -> dict[bytes, tuple[int, int]]:
    return {each.key: (each.offset, each.length) for each in table.objects()}


def next_table(journal: Journal) -> ClockedTable:
    table = ClockedTable(OrderedLru(), journal=journal)
    found = journal_module.read(journal.memory, CAPACITY)
    journal.holds(found)
    table.now = 9.0
    table.adopt(found, [])
    table.allocator.grow(CAPACITY)
    return table


def test_the_end_of_a_prefix_is_evicted_first_after_a_restart_too(journal: Journal) -> None:
    table = table_of(journal)
    store(table, 3, now=3.0)
    store(table, 0, 1, 2, now=2.0)
    assert list(next_table(journal).tenants.policies[0].victims()) == [KEYS[2], KEYS[1], KEYS[0], KEYS[3]]


def test_uses_are_kept(journal: Journal) -> None:
    table = table_of(journal)
    store(table, 0, now=1.0)
    store(table, 1, now=2.0)
    table.now = 5.0
    table.expire()
    table.pin([KEYS[0]], owner=1)
    journal.write_uses()
    assert [each.key for each in slots_of(journal).objects] == [KEYS[1], KEYS[0]]


PLACES = st.tuples(st.integers(0, UNITS - 1), st.sampled_from(SIZES), st.sampled_from([1.0, 2.0, 3.0]), st.booleans())


@settings(max_examples=50)
@given(places=st.lists(PLACES, max_size=UNITS), removed=st.sets(st.integers(0, UNITS - 1)))
def test_what_is_read_is_what_was_written(places: list[tuple[int, int, float, bool]], removed: set[int]) -> None:
    journal = Journal.create(IDENTITY)
    try:
        free, written, reserved = set(range(UNITS)), [], []
        for number, (unit, nbytes, now, commit) in enumerate(places):
            units = set(range(unit, unit + rounded(nbytes) // ALIGNMENT))
            if not units <= free:
                continue
            free -= units
            key, offset = packed_key(number), unit * ALIGNMENT
            (slot,) = journal.reserve([(key, offset, nbytes)], owner=number + 1, tenant=0)
            if commit:
                journal.commit([slot], now)
                journal.sealed(slot, number)
            if number in removed:
                journal.release([slot])
                free |= units
            elif commit:
                written.append((now, -number, slot, key, offset, nbytes, number))
            else:
                reserved.append((slot, offset, nbytes, 1 << 32 | number + 1, 0))
        found = slots_of(journal)
        assert [
            (each.used, each.slot, each.key, each.offset, each.length, each.checksum) for each in found.objects
        ] == [(used, *rest) for used, _, *rest in sorted(written)]
        assert found.reservations == sorted(reserved)
        slots = journal.memory[journal_module.SLOTS_AT :].nbytes // journal_module.SLOT_BYTES
        taken = {each.slot for each in (*found.objects, *found.reservations)}
        assert found.free == sorted(set(range(slots)) - taken, reverse=True)
        gaps = {offset // ALIGNMENT + at for offset, length in found.gaps for at in range(length // ALIGNMENT)}
        assert gaps | set(range(found.end // ALIGNMENT, UNITS)) == free
    finally:
        journal.close()


def test_a_damaged_slot_is_named(journal: Journal) -> None:
    slots = journal.reserve([(key, 0, 1) for key in KEYS[:8]], owner=INTERNAL_OWNER, tenant=0)
    journal.release([slots[4]])
    for at, named in ((8, "slot 5 of the journal"), (0, "slot 5 of the journal")):
        place = journal_module.SLOTS_AT + 5 * journal_module.SLOT_BYTES + at
        journal.memory[place] ^= 1
        with pytest.raises(Cold, match=named):
            slots_of(journal)
        journal.memory[place] ^= 1


def test_a_range_that_an_earlier_client_may_write_is_quarantined_until_it_ends(journal: Journal) -> None:
    store(table_of(journal), 0, 1, owner=3, commit=False)
    table = next_table(journal)
    (writer,) = table.earlier_writers
    assert (table.quarantined_bytes, table.allocator.free_bytes) == (2 * ALIGNMENT, CAPACITY - 2 * ALIGNMENT)
    # Its name can be stored again meanwhile, elsewhere.
    store(table, 0)
    table.writer_ended(writer)
    assert (table.quarantined_bytes, table.earlier_writers) == (0, [])
    assert table.allocator.free_bytes == CAPACITY - ALIGNMENT
    assert not slots_of(journal).reservations


def test_tenants_are_known_by_name(journal: Journal) -> None:
    journal.begin(["first", "second"])
    (slot,) = journal.reserve([(KEYS[0], 0, ALIGNMENT)], owner=1, tenant=2)
    journal.commit([slot], 1.0)
    journal.begin(["second", "third"])
    (slot,) = journal.reserve([(KEYS[1], ALIGNMENT, ALIGNMENT)], owner=1, tenant=1)
    journal.commit([slot], 1.0)
    found = journal_module.read(journal.memory, CAPACITY)
    assert [found.start.tenants[each.tenant - 1] for each in found.slots.objects] == ["second", "second"]


def test_records_of_namespaces(journal: Journal) -> None:
    first, second, third = (bytes([number]) * 16 for number in (1, 2, 3))
    for namespace in (first, second, third):
        journal.record(namespace, namespace * (RECORD_BYTES // 16), learned=namespace == third)
    journal.record(first, bytes(RECORD_BYTES), learned=False)
    journal.forget(second)
    found = {
        namespace: (value, learned)
        for namespace, _, value, learned in journal_module.read(journal.memory, CAPACITY).namespaces
    }
    assert found == {first: (bytes(RECORD_BYTES), False), third: (third * (RECORD_BYTES // 16), True)}


def test_a_record_that_is_there_is_not_written_again(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes over records what it has read: no kill then may cost a record."""
    journal.record(bytes(16), b"x" * RECORD_BYTES, learned=False)
    written: list[int] = []
    monkeypatch.setattr(journal, "_put", lambda at, _data: written.append(at))
    journal.record(bytes(16), b"x" * RECORD_BYTES, learned=False)
    assert not written
    journal.record(bytes(16), b"x" * RECORD_BYTES, learned=True)
    assert written


def test_a_journal_without_memory_ends_and_the_server_goes_on(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = table_of(journal)
    store(table, 0)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    store(table, 1, 2, 3, 4, 5)
    store(table, 6)
    table.drop([KEYS[0], KEYS[1]])
    assert len(table) == 5
    assert "the journal of L1 failed, so the next server starts with an empty L1:" in caplog.text
    with pytest.raises(Cold, match="no_journal"):
        journal_module.read_identity(journal.memory)


class Moments:
    """The bytes of the slots before each line of the journal that runs, and the tables that the calls began and ended
    with."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.seen: list[bytes] = []

    def __enter__(self) -> Moments:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self.seen.append(bytes(self.journal.memory[journal_module.SLOTS_AT :]))

    def _call(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._line if frame.f_code.co_filename == journal_module.__file__ else None

    def _line(self, _frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line":
            self.seen.append(bytes(self.journal.memory[journal_module.SLOTS_AT :]))
        return self._line


actions = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(SIZES)), max_size=4)),
        st.tuples(st.sampled_from(["commit", "abort", "cancel", "end", "drop"]), st.integers(0, 1 << 16)),
    ),
    max_size=20,
)


def act(table: ClockedTable, open_leases: dict[str, int], what: str, with_: Any) -> None:
    if what == "reserve":
        owner = len(with_) % 3 + 1
        lease = table.reserve(with_, owner=owner, request_id="r").lease
        if lease is not None:
            open_leases[lease.id] = owner
        return
    if what == "drop":
        table.drop([KEYS[with_ % len(KEYS)]])
        return
    if what in ("cancel", "end"):
        owner = with_ % 3 + 1
        table.cancel(owner) if what == "cancel" else table.end_owner(owner)
        if what == "end":
            for lease_id in [each for each, whose in open_leases.items() if whose == owner]:
                del open_leases[lease_id]
        return
    if open_leases:
        lease_id = list(open_leases)[with_ % len(open_leases)]
        owner = open_leases.pop(lease_id)
        if what == "commit":
            table.now = float(with_)
            table.commit(lease_id, owner=owner)
        else:
            table.abort(lease_id, owner=owner)


def taken(table: ClockedTable) -> int:
    return table.allocator.limit - table.allocator.free_bytes


@settings(deadline=None)
@given(actions)
def test_the_next_server_finds_the_table_as_it_was(steps: list[tuple[str, Any]]) -> None:
    journal = Journal.create(IDENTITY)
    try:
        table, leases = table_of(journal), dict[str, int]()
        for what, with_ in steps:
            act(table, leases, what, with_)
            found = slots_of(journal)
            assert objects_of(found) == objects_in(table)
            reserved = sum(rounded(each.length) for each in found.reservations)
            assert reserved + sum(rounded(length) for _, length in objects_of(found).values()) == taken(table)
        after = next_table(journal)
        assert objects_in(after) == objects_in(table)
        assert (taken(after), after.used_bytes) == (taken(table), table.used_bytes)
        for writer in after.earlier_writers:
            after.writer_ended(writer)
        assert taken(after) == sum(rounded(length) for _, length in objects_in(after).values())
        after.drop(list(objects_in(after)))
        assert after.allocator.free_bytes == CAPACITY
        assert journal.memory[journal_module.SLOTS_AT :].nbytes // journal_module.SLOT_BYTES == len(
            slots_of(journal).free
        )
    finally:
        journal.close()


@settings(deadline=None, max_examples=20)
@given(actions, st.randoms(use_true_random=False))
def test_a_server_that_is_killed_at_any_instruction_leaves_a_whole_journal(
    steps: list[tuple[str, Any]], chance: random.Random
) -> None:
    journal = Journal.create(IDENTITY)
    try:
        table, leases = table_of(journal), dict[str, int]()
        for what, with_ in steps:
            before = objects_in(table)
            moments = Moments(journal)
            with moments:
                act(table, leases, what, with_)
            after = objects_in(table)
            for earlier, later in zip(moments.seen, moments.seen[1:], strict=False):
                found = journal_module.read_slots(memoryview(torn(earlier, later, chance)), CAPACITY)
                # Each object is whole: it was there before, or is there afterwards.
                assert objects_of(found).items() <= before.items() | after.items()
                assert objects_of(found).items() >= before.items() & after.items()
    finally:
        journal.close()


def torn(earlier: bytes, later: bytes, chance: random.Random) -> bytearray:
    """Some of the words that differ, the first ones, have been written."""
    mixed = bytearray(later)
    if len(earlier) == len(later):
        words = [at for at in range(0, len(later), 8) if earlier[at : at + 8] != later[at : at + 8]]
        for at in words[chance.randint(0, len(words)) :]:
            mixed[at : at + 8] = earlier[at : at + 8]
    return mixed


@pytest.fixture
def used(journal: Journal) -> Journal:
    table = table_of(journal)
    journal.begin(["tenant"])
    journal.record(bytes(16), b"x" * RECORD_BYTES, learned=False)
    store(table, 0, 1)
    store(table, 2, owner=7, commit=False)
    return journal


def open_whole(memory: memoryview) -> FoundSlots:
    if journal_module.read_identity(memory) != IDENTITY:
        raise Cold("other_configuration")
    journal_module.read_start(memory)
    return journal_module.read_slots(memory[journal_module.SLOTS_AT :], CAPACITY)


def test_any_bit_that_flips_is_a_cold_start_or_changes_nothing(used: Journal) -> None:
    whole = open_whole(used.memory)
    slots = used.memory[journal_module.SLOTS_AT :].nbytes // journal_module.SLOT_BYTES
    places = [
        *range(journal_module.IDENTITY_AT + 64),
        *range(journal_module.STARTS_AT, journal_module.STARTS_AT + 40),
        *range(
            journal_module.STARTS_AT + journal_module.START_BYTES,
            journal_module.STARTS_AT + journal_module.START_BYTES + 40,
        ),
        *range(journal_module.SLOTS_AT, journal_module.SLOTS_AT + slots * journal_module.SLOT_BYTES),
    ]
    outcomes = set()
    for at in places:
        for bit in range(8):
            damaged = used.memory
            damaged[at] ^= 1 << bit
            try:
                found = open_whole(damaged)
                outcomes.add("the same")
                assert objects_of(found) == objects_of(whole)
                assert found.reservations == whole.reservations
            except Cold:
                outcomes.add("cold")
            finally:
                damaged[at] ^= 1 << bit
    assert outcomes == {"the same", "cold"}


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        4095,
        journal_module.HEADS_AT,
        journal_module.SLOTS_AT - 1,
        journal_module.SLOTS_AT + 1,
        journal_module.SLOTS_AT + journal_module.SLOT_BYTES + 5,
    ],
)
def test_a_journal_cut_off(used: Journal, size: int) -> None:
    with pytest.raises(Cold, match="damaged"):
        open_whole(used.memory[:size])


def test_a_newer_release(used: Journal) -> None:
    schema = journal_module.SCHEMA
    used.memory[8:12] = (schema + 1).to_bytes(4, "little")
    with pytest.raises(Cold, match=f"other_release: the journal has schema {schema + 1}, expected {schema}"):
        # Its size is that of its own release.
        open_whole(used.memory[: journal_module.SLOTS_AT - 8])


def test_ranges_that_overlap(journal: Journal) -> None:
    journal.commit(journal.reserve([(KEYS[0], 0, 2 * ALIGNMENT)], owner=INTERNAL_OWNER, tenant=0), 1.0)
    journal.commit(journal.reserve([(KEYS[1], ALIGNMENT, ALIGNMENT)], owner=INTERNAL_OWNER, tenant=0), 1.0)
    with pytest.raises(Cold, match="the range at byte 4096"):
        slots_of(journal)


def test_a_range_beyond_the_arena(journal: Journal) -> None:
    journal.commit(journal.reserve([(KEYS[0], CAPACITY, ALIGNMENT)], owner=INTERNAL_OWNER, tenant=0), 1.0)
    with pytest.raises(Cold, match="damaged"):
        slots_of(journal)


def test_a_damaged_record_of_a_namespace_is_left_out(used: Journal) -> None:
    for at in (
        journal_module.HEADS_AT,
        journal_module.HEADS_AT + 16,
        journal_module.HEADS_AT + 24,
        journal_module.RECORDS_AT + 5,
    ):
        used.memory[at] ^= 1
        assert not journal_module.read(used.memory, CAPACITY).namespaces
        used.memory[at] ^= 1
    assert len(journal_module.read(used.memory, CAPACITY).namespaces) == 1


def test_tenants_get_their_objects_back_in_another_order(journal: Journal) -> None:
    names = ["one", "two"]

    def table(order: list[str]) -> ClockedTable:
        tenants = [Tenant(name, 0, CAPACITY, OrderedLru()) for name in order]
        return ClockedTable(OrderedLru(), tenants=tenants, journal=journal)

    def key(number: int, salt: int) -> bytes:
        return packed_key(number)[:16] + bytes([salt]) * 16 + packed_key(number)[32:]

    before = table(names)
    journal.begin(names)
    before.allocator.grow(CAPACITY)
    for salt, tenant in ((1, 1), (2, 2)):
        before.tenants.learn(bytes([salt]) * 16, tenant)
    for number, salt in enumerate([1, 2, 1, 0, 2, 2]):
        lease = before.reserve([(key(number, salt), ALIGNMENT)], owner=1).lease
        assert lease is not None
        before.now = float(number)
        before.commit(lease.id, owner=1)
    assert before.tenants.used == [ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT]
    after = table(["two", "one"])
    found = journal_module.read(journal.memory, CAPACITY)
    after.now = 9.0
    after.adopt(found, [["", "two", "one"].index(name) for name in found.start.tenants])
    assert after.tenants.used == [ALIGNMENT, 3 * ALIGNMENT, 2 * ALIGNMENT]
    assert after.used_bytes == 6 * ALIGNMENT
    assert after.tenants.of(key(9, 2)) == 1
    assert list(after.tenants.policies[1].victims()) == [key(1, 2), key(4, 2), key(5, 2)]
    assert {where[2]: account.nbytes for where, account in after.accounts.items()} == {
        0: ALIGNMENT,
        1: 3 * ALIGNMENT,
        2: 2 * ALIGNMENT,
    }
