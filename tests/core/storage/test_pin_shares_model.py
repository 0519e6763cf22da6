"""What each session keeps from eviction, against a model that counts it anew; and whose hits lapse, and when.

Hypothesis drives an object table of a few units, with sessions that look up, load, store, free and end."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvframework.api.keys import PackedKey
from kvframework.errors import LeaseUnknown
from kvframework.storage.l1.entries import ALIGNMENT, rounded
from kvframework.storage.l1.leases import INTERNAL_OWNER, NEEDED_S, PinLease, WriteLease
from kvframework.storage.l1.objects import ObjectTable
from tests.core.storage.memory import ClockedTable, OrderedLru, packed_key

UNITS, MOST = 12, 5
KEYS = [packed_key(number) for number in range(16)]
SESSIONS = [1, 2, 3]
sessions = st.sampled_from(SESSIONS)
keys_of = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)
sizes = st.sampled_from([1, ALIGNMENT, 2 * ALIGNMENT - 1])


@dataclass
class Pinned:
    """A pin lease as its session sees it."""

    lease: PinLease
    hit: bool
    keys: list[PackedKey]
    lapsed: bool = False


class SharesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = ObjectTable(OrderedLru(), nbytes=UNITS * ALIGNMENT, clock=lambda: self.now)
        self.table.shares.configure(MOST * ALIGNMENT)
        # The sessions that found L1 full.
        self.needs: list[int] = []
        need = self.table.shares.need

        def noted(payer: int, now: float) -> None:
            self.needs.append(payer)
            need(payer, now)

        self.table.shares.need = noted  # type: ignore[method-assign]
        self.pins: list[Pinned] = []
        self.writes: list[WriteLease] = []

    @property
    def shares(self) -> dict[int, int]:
        return self.table.shares.held

    def here(self, keys: list[PackedKey]) -> list[PackedKey]:
        return [key for key in keys if key in self.table]

    def noticed(self, by: int, *, full: bool) -> None:
        """Note the hits that have lapsed: only of sessions above their share, only for another one that needs room, the
        oldest first, and no more than that."""
        lapsed = [each for each in self.pins if not each.lapsed and not each.lease.held]
        for each in lapsed:
            assert each.hit
            assert each.lease.payer != self.table.shares.payer(by)
            assert full
            each.lapsed = True
            older = [
                one for one in self.pins[: self.pins.index(each)] if one.hit and one.lease.payer == each.lease.payer
            ]
            assert all(one.lapsed for one in older), "the oldest lapse first"
        if full:
            left = {each.lease.payer for each in self.pins if each.hit and not each.lapsed}
            assert not (self.table.shares.over - {self.table.shares.payer(by)}) & left, (
                "who holds more than its share has no hit left"
            )

    @rule(session=sessions, keys=keys_of, size=sizes, commits=st.booleans())
    def store(self, session: int, keys: list[PackedKey], size: int, commits: bool) -> None:
        self.needs.clear()
        result = self.table.reserve([(key, size) for key in keys], owner=session, client=session)
        bound = self.table.shares.is_bound(self.table.shares.payer(session), self.now)
        if bound and result.placed:
            assert self.shares[self.table.shares.payer(session)] <= MOST * ALIGNMENT, "others need room"
        payer = self.table.shares.payer(session)
        assert self.needs in ([], [payer])
        assert self.needs or not result.dropped or result.over_share or bound, "L1 was full"
        self.noticed(session, full=bool(self.needs))
        if result.lease is None:
            return
        if commits:
            self.table.commit(result.lease.id, owner=session)
        else:
            self.writes.append(result.lease)

    @rule(session=sessions, keys=keys_of)
    def look_up(self, session: int, keys: list[PackedKey]) -> None:
        found = self.table.find(self.here(keys))
        if found:
            lease = self.table.pin_objects(found, owner=session, hit=True)
            self.pins.append(Pinned(lease, True, self.here(keys)))

    @rule(session=sessions, asked_by=st.sampled_from([None, *SESSIONS]), keys=keys_of)
    def load(self, session: int, asked_by: int | None, keys: list[PackedKey]) -> None:
        found = self.table.find(self.here(keys))
        if not found:
            return
        lease = self.table.pin_objects(found, owner=session, asked_by=asked_by)
        payer, bound = lease.payer, self.table.shares.is_bound(lease.payer, self.now)
        if self.table.keep_within_share(lease):
            assert not bound or self.shares[payer] <= MOST * ALIGNMENT
            self.pins.append(Pinned(lease, False, self.here(keys)))
        else:
            assert bound
        for each in self.pins:
            if not each.lapsed and not each.lease.held:
                assert each.hit
                assert bound
                assert each.lease.payer == payer, "its own hits make place for its load"
                each.lapsed = True

    @rule(session=sessions, payer=sessions)
    def belongs(self, session: int, payer: int) -> None:
        self.table.shares.work_for(session, payer)

    @precondition(lambda self: self.pins)
    @rule(number=st.integers(0, 99))
    def free(self, number: int) -> None:
        each = self.pins.pop(number % len(self.pins))
        with pytest.raises(LeaseUnknown) if each.lapsed else nullcontext():
            self.table.unpin(each.lease.id, owner=each.lease.owner)

    @precondition(lambda self: self.writes)
    @rule(number=st.integers(0, 99), commits=st.booleans())
    def end_write(self, number: int, commits: bool) -> None:
        lease = self.writes.pop(number % len(self.writes))
        if commits:
            self.table.commit(lease.id, owner=lease.owner)
        else:
            self.table.abort(lease.id, owner=lease.owner)

    @rule(session=sessions)
    def end(self, session: int) -> None:
        self.table.end_owner(session)
        self.pins = [each for each in self.pins if each.lease.owner != session]
        self.writes = [each for each in self.writes if each.owner != session]
        needs = self.table.shares._needs
        assert session not in needs, "who has ended needs nothing"

    @rule(key=st.sampled_from(KEYS))
    def server_holds(self, key: PackedKey) -> None:
        """Pins of the server count for no session."""
        found = self.table.find(self.here([key]))
        if found:
            lease = self.table.pin_objects(found, owner=INTERNAL_OWNER)
            self.pins.append(Pinned(lease, False, [key]))

    @rule(most=st.integers(1, UNITS))
    def configure(self, most: int) -> None:
        self.table.shares.configure(most * ALIGNMENT)
        self.table.shares.configure(MOST * ALIGNMENT)

    @rule(seconds=st.sampled_from([1.0, NEEDED_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire()

    @invariant()
    def what_each_holds_is_what_its_leases_say(self) -> None:
        objects: dict[int, dict[PackedKey, int]] = {}
        held: Counter[int] = Counter()
        pins: Counter[PackedKey] = Counter()
        for each in self.pins:
            for stored in each.lease.objects:
                objects.setdefault(each.lease.payer, {})[stored.key] = rounded(stored.length)
                pins[stored.key] += 1
        for write in self.writes:
            held[write.payer] += sum(rounded(nbytes) for _, _, nbytes in write.items)
            for stored in write.present:
                objects.setdefault(write.payer, {})[stored.key] = rounded(stored.length)
                pins[stored.key] += 1
        for payer, of in objects.items():
            held[payer] += sum(of.values())
        held[INTERNAL_OWNER] = 0
        assert self.shares == {payer: nbytes for payer, nbytes in held.items() if nbytes}
        assert self.table.shares.over == {payer for payer, nbytes in held.items() if nbytes > MOST * ALIGNMENT}
        assert {stored.key: stored.pins for stored in self.table.objects() if stored.pins} == dict(pins)
        assert self.table.pins == sum(pins.values())
        assert all(len(pins) > 1 for pins in self.table.shares._several.values())
        leases = self.table._leases
        held_pins = [each.lease for each in self.pins if not each.lapsed]
        opened = Counter(each.payer for each in held_pins) + Counter(each.payer for each in self.writes)
        assert leases._open == +opened
        pinned = Counter[int]()
        for lease in held_pins:
            pinned[lease.payer] += len(lease.objects)
        assert +leases._pinned == +pinned


SharesMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestShares = SharesMachine.TestCase


@given(st.lists(st.tuples(sessions, keys_of), max_size=60))
@settings(deadline=None)
def test_a_session_alone_is_never_bound(lookups: list[tuple[int, list[PackedKey]]]) -> None:
    table = ClockedTable(OrderedLru(), nbytes=8 * ALIGNMENT)
    table.shares.configure(ALIGNMENT)
    table.shares.work_for(2, 1)
    table.shares.work_for(3, 1)
    leases = []
    for session, keys in lookups:
        reserved = table.reserve([(key, 1) for key in keys], owner=session, client=session)
        if reserved.lease is not None:
            table.commit(reserved.lease.id, owner=session)
        found = table.find([key for key in keys if key in table])
        for hit in (True, False):
            if found:
                lease = table.pin_objects(list(found), owner=session, hit=hit)
                assert table.keep_within_share(lease)
                leases.append(lease)
    assert all(lease.held for lease in leases)
    assert not table.shares.all_cuts


def test_what_a_worker_needed_before_its_first_load_binds_its_own_scheduler_no_more() -> None:
    table = ClockedTable(OrderedLru(), nbytes=8 * ALIGNMENT)
    table.shares.configure(4 * ALIGNMENT)
    scheduler, worker, other = 1, 2, 3
    stored = table.reserve([(key, 1) for key in KEYS[:8]], owner=worker, client=worker)
    objects = table.commit(stored.lease.id, owner=worker)
    loaded = table.pin_objects(objects[:6], owner=worker, request_id="r", asked_by=scheduler)
    table.reserve([(key, 1) for key in KEYS[8:12]], owner=worker, client=worker)
    table.shares.work_for(worker, scheduler)
    assert table.keep_within_share(loaded), "the engine is alone"
    assert table.shares.is_bound(other, 0.0), "the engine needs room"
    table.reserve([(KEYS[12], 1)], owner=other, client=other)
    assert not table.keep_within_share(loaded)
