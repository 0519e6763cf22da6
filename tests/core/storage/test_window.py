"""What leaves L1 for an object that needs more contiguous bytes than are free: as little as addresses allow, in the
policy's order as far as they allow it, at a cost that does not grow with L1."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframework.api.keys import PackedKey
from kvframework.storage.l1.entries import ALIGNMENT, ObjectRows, rounded
from kvframework.storage.l1.objects import ObjectTable
from tests.core.storage.memory import OrderedLru, packed_key

LARGE = 2 << 20
PAGES = LARGE // ALIGNMENT


class WatchedLru(OrderedLru):
    """`left` holds what left since it was read last, as (key, bytes); `offered` counts victims."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[tuple[PackedKey, int]] = []
        self.offered = 0

    def on_remove(self, key: PackedKey) -> None:
        self.left.append((key, rounded(self.order[key])))
        super().on_remove(key)

    def victims(self) -> Iterator[PackedKey]:
        for key in self.order:
            self.offered += 1
            yield key


class Table:
    """An object table, with stores of one object at a time, numbered from 0."""

    def __init__(self, units: int) -> None:
        self.policy = WatchedLru()
        self.table = ObjectTable(self.policy, nbytes=units * ALIGNMENT)
        self.stored = 0

    def store(self, nbytes: int) -> list[tuple[PackedKey, int]] | None:
        """What left for it; None if it was refused."""
        self.policy.left = []
        key = packed_key(self.stored)
        lease = self.table.reserve([(key, nbytes)], owner=1).lease
        if lease is None:
            return None
        self.stored += 1
        self.table.commit(lease.id, owner=1)
        return self.policy.left

    def fill(self, nbytes: int = ALIGNMENT) -> None:
        while self.table.allocator.largest_free >= rounded(nbytes):
            self.store(nbytes)

    def use(self, *numbers: int) -> None:
        for number in numbers:
            self.policy.on_access(packed_key(number))

    def use_in_any_order(self, seed: int) -> None:
        """Age has nothing to do with the address any more."""
        keys = list(self.policy.order)
        random.Random(seed).shuffle(keys)
        self.policy.on_access_many(keys)

    def pin(self, key: PackedKey) -> str:
        lease = self.table.pin([key], owner=1, use=None)
        return lease.id

    def widest_window(self) -> int:
        """Contiguous bytes that are free, or would be if all that is not pinned left."""
        units = self.table.allocator.limit // ALIGNMENT
        stays = [False] * units
        for stored in self.table.objects():
            for unit in range(stored.offset // ALIGNMENT, (stored.offset + rounded(stored.length)) // ALIGNMENT):
                stays[unit] = stored.pins > 0
        return max((len(list(run)) for stuck, run in groupby(stays) if not stuck), default=0) * ALIGNMENT


def bounded(left: list[tuple[PackedKey, int]], needed: int) -> bool:
    """Less than twice what is needed, or one object that alone has enough."""
    sizes = [nbytes for _, nbytes in left]
    return sum(sizes) < 2 * needed or (len(sizes) == 1 and sizes[0] >= needed)


@pytest.mark.parametrize("seed", range(3))
def test_a_large_object_pushes_out_no_more_than_it_needs(seed: int) -> None:
    full = Table(8 * PAGES)
    full.fill()
    full.use_in_any_order(seed)
    for _ in range(4):
        left = full.store(LARGE)
        assert left is not None
        assert sum(nbytes for _, nbytes in left) == LARGE


def test_the_first_victim_alone_leaves_where_it_is_enough() -> None:
    full = Table(64)
    full.fill(3 * ALIGNMENT)
    full.use_in_any_order(1)
    for _ in range(100):
        first = next(iter(full.policy.order))
        full.policy.offered = 0
        assert full.store(3 * ALIGNMENT) == [(first, 3 * ALIGNMENT)]
        assert full.policy.offered == 1


def test_what_was_used_last_together_and_lies_together_leaves_together() -> None:
    """Prompts of 64 objects, side by side: the oldest prompt leaves, though its oldest object lies at its end."""
    full = Table(64 * 32)
    full.fill()
    prompts = [list(range(first, first + 64)) for first in range(0, 64 * 32, 64)]
    order = random.Random(5).sample(prompts, len(prompts))
    for prompt in order:
        full.use(*reversed(prompt))
    for prompt in order[:8]:
        left = full.store(64 * ALIGNMENT)
        assert left is not None
        assert {key for key, _ in left} == {packed_key(number) for number in prompt}


def test_an_old_object_among_hot_ones_does_not_draw_them_along() -> None:
    full = Table(256)
    full.fill()
    hot = [number for number in range(128) if number != 60]
    full.use(*hot)
    left = full.store(16 * ALIGNMENT)
    assert left is not None
    assert not {key for key, _ in left} & {packed_key(number) for number in hot}


sizes = st.sampled_from([1, 1, 1, 2, 3, 5, 8, 13, 21]).map(lambda pages: pages * ALIGNMENT)
steps = st.one_of(
    st.tuples(st.just("store"), sizes),
    st.tuples(st.just("use"), st.integers(0, 99)),
    st.tuples(st.just("pin"), st.integers(0, 99)),
    st.tuples(st.just("unpin"), st.integers(0, 99)),
)


@given(st.integers(21, 40), st.lists(steps, min_size=10, max_size=50))
@settings(deadline=None, max_examples=60)
def test_the_bound_holds_for_any_mix_and_it_is_refused_only_where_nothing_could_be_done(
    units: int, play: list[tuple[str, int]]
) -> None:
    table, pins = Table(units), list[str]()
    table.fill()
    table.use_in_any_order(units)
    for what, number in play:
        keys = list(table.policy.order)
        if what == "store":
            widest = table.widest_window()
            left = table.store(number)
            assert (left is None) == (widest < number)
            assert bounded(left or [], number)
            assert left is not None or not table.policy.left
        elif what == "use" and keys:
            table.policy.on_access(keys[number % len(keys)])
        elif what == "pin" and keys:
            pins.append(table.pin(keys[number % len(keys)]))
        elif what == "unpin" and pins:
            table.table.unpin(pins.pop(number % len(pins)), owner=1)


@pytest.mark.parametrize("ages", ["stored", "any"])
def test_over_a_long_mix_of_sizes_little_more_leaves_than_comes(ages: str) -> None:
    """Mostly 4 KiB, some of up to 2 MiB, a few pinned for a while."""
    table, chance = Table(12 * PAGES), random.Random(3)
    table.fill()
    if ages == "any":
        table.use_in_any_order(3)
    pins: list[str] = []
    came = went = refused = 0
    for turn in range(3000):
        nbytes = chance.choices([1, 4, 32, PAGES], [900, 80, 15, 5])[0] * ALIGNMENT
        left = table.store(nbytes)
        refused += left is None
        came += 0 if left is None else nbytes
        went += sum(size for _, size in left or ())
        assert bounded(left or [], nbytes)
        if turn % 10 == 0:
            pins.append(table.pin(chance.choice(list(table.policy.order))))
        if len(pins) > 12:
            table.table.unpin(pins.pop(0), owner=1)
    assert came > 20 << 20
    assert went < 1.2 * came
    assert refused < 10


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The places of the arena at which objects were looked for."""
    seen: list[int] = []
    at = ObjectRows.at

    def counted(rows: ObjectRows, offset: int) -> object:
        seen.append(offset)
        return at(rows, offset)

    monkeypatch.setattr(ObjectRows, "at", counted)
    return seen


def test_a_choice_costs_no_more_in_a_larger_l1(looks: list[int]) -> None:
    """Counts victims that the policy offers, and objects that are looked at by their place."""
    cost = {}
    for units in (16 * PAGES, 48 * PAGES):
        full = Table(units)
        full.fill()
        full.use_in_any_order(units)
        full.policy.offered = 0
        looks.clear()
        assert full.store(LARGE) is not None
        cost[units] = len(looks), full.policy.offered
        assert len(looks) <= 2 * PAGES
        assert full.policy.offered <= 4 * PAGES + 1
    assert len(set(cost.values())) == 1


def test_a_refusal_costs_no_more_in_a_larger_l1(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin in every 2 MiB: however many objects there are, only so many are looked at."""
    monkeypatch.setattr("kvframework.storage.l1.eviction.MOST_LOOKS", 1000)
    full = Table(40 * PAGES)
    full.fill()
    for number in range(PAGES - 1, 40 * PAGES, PAGES):
        full.pin(packed_key(number))
    full.use_in_any_order(2)
    full.policy.offered = 0
    looks.clear()
    assert full.store(LARGE) is None
    assert full.policy.offered + len(looks) <= 1000 + 3 * PAGES, "what a store that is refused costs everybody"
    assert full.policy.left == []
