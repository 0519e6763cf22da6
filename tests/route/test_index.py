"""The index against dictionaries. The set of keys against a set; and that it takes as many keys as it promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvf_route import index as module
from kvf_route.index import ABSENT, Index, Keys, Table

EXTERNALS = st.lists(st.integers(0, 12), max_size=8, unique=True)
OWNS = [0x1234567890ABCDEF * (each + 1) % (1 << 64) for each in range(5)]


def keys(numbers: list[int]) -> Keys:
    return np.array(numbers, np.uint64)


class Indexing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "_SWEPT", 1000)
        self.index = Index(2000)
        self.model: dict[int, dict[int, int]] = {}

    @rule()
    @precondition(lambda self: len(self.model) < 4)
    def open(self) -> None:
        place = self.index.open()
        assert place not in self.model
        self.model[place] = {}

    @precondition(lambda self: self.model)
    @rule(data=st.data(), externals=EXTERNALS)
    def store(self, data: st.DataObject, externals: list[int]) -> None:
        place = data.draw(st.sampled_from(sorted(self.model)))
        owns = data.draw(st.lists(st.sampled_from(OWNS), min_size=len(externals), max_size=len(externals)))
        assert self.index.store(place, keys(externals), keys(owns)) == 0
        self.model[place].update(zip(externals, owns, strict=True))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), externals=st.lists(st.integers(0, 12), max_size=8))
    def remove(self, data: st.DataObject, externals: list[int]) -> None:
        place = data.draw(st.sampled_from(sorted(self.model)))
        there = {each for each in externals if each in self.model[place]}
        assert self.index.remove(place, keys(externals)) == len(there)
        for each in there:
            del self.model[place][each]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        places = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
        self.index.close(places)
        for place in places:
            del self.model[place]

    @rule()
    def sweep(self) -> None:
        self.index.sweep()

    @invariant()
    def is_the_model(self) -> None:
        places = sorted(self.model)
        if not places:
            return
        externals = list(range(13))
        assert self.index.holds(places, keys(OWNS)).tolist() == [
            [own in self.model[place].values() for own in OWNS] for place in places
        ]
        assert self.index.holds_externals(places, keys(externals)).tolist() == [
            [each in self.model[place] for each in externals] for place in places
        ]
        for place in places:
            assert self.index.size(place) == len(self.model[place])
            known, owns = self.index.own([place], keys(externals))
            assert {each: int(own) for each, here, own in zip(externals, known, owns, strict=True) if here} == (
                self.model[place]
            )

    def teardown(self) -> None:
        while self.index.sweep():
            pass
        self.patch.undo()
        assert np.count_nonzero(self.index._externals._keys) == sum(map(len, self.model.values()))
        assert np.count_nonzero(self.index._held._keys) == sum(len(set(held.values())) for held in self.model.values())


TestIndexing = Indexing.TestCase
TestIndexing.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_what_finds_no_room_is_counted_and_leaves_nothing_behind() -> None:
    index = Index(50)
    place = index.open()
    many = keys(list(range(1000)))
    owns = np.random.default_rng(2).integers(1, 1 << 63, 1000, dtype=np.uint64)
    refused = index.store(place, many, owns)
    assert refused > 800
    assert index.size(place) == 1000 - refused
    assert int(index.holds([place], owns).sum()) == 1000 - refused
    assert index.remove(place, many) == 1000 - refused
    assert not index._held._keys.any()


def test_more_names_for_the_same_tokens_than_can_be_counted_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_EQUAL", 3)
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    index = Index(1000)
    place = index.open()
    assert index.store(place, keys([1, 2, 3, 4, 5]), keys([OWNS[0]] * 5)) == 2
    assert index.remove(place, keys([1, 2, 3, 4, 5])) == 3
    assert not index.holds([place], keys(OWNS)).any()


def test_there_are_so_many_places_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PLACES", 2)
    index = Index(100)
    assert [index.open(), index.open(), index.open()] == [0, 1, None]
    index.close([0])
    assert index.open() is None
    while index.sweep():
        pass
    assert index.open() == 0


def test_ten_million_blocks_take_400_mb() -> None:
    assert Index(10_000_000).bytes <= 10_000_000 * 41


KEYS = st.lists(st.integers(1, 40).map(lambda small: small * 0x9E3779B97F4A7C15 % (1 << 64)), max_size=12)


@given(st.lists(st.tuples(st.booleans(), KEYS), max_size=12))
def test_it_is_a_set(steps: list[tuple[bool, list[int]]]) -> None:
    table, model = Table(100), set[int]()
    for adds, keys in steps:
        asked = np.array(keys, np.uint64)
        if adds:
            slots, new = table.add(asked)
            assert (slots != ABSENT).all()
            assert new.tolist() == [key not in model for key in keys]
            assert len(set(slots.tolist())) == len(set(keys))
            model |= set(keys)
        else:
            slots = np.unique(table.find(asked))
            table.discard(slots[slots != ABSENT])
            model -= set(keys)
        known = np.array(sorted(model), np.uint64)
        assert (table.find(known) != ABSENT).all()
        assert ((table.find(asked) != ABSENT) == [key in model for key in keys]).all()


def test_it_takes_the_keys_that_it_has_room_for_and_says_what_it_refuses() -> None:
    keys = np.random.default_rng(1).integers(1, 1 << 63, 200_000, dtype=np.uint64) * np.uint64(2)
    table = Table(100_000)
    first, _ = table.add(keys[:100_000])
    assert (first == ABSENT).sum() < 100_000 * 0.0001
    more, new = table.add(keys[100_000:])
    assert (new == (more != ABSENT)).all()
    assert (more == ABSENT).any()
    assert len(np.unique(more[more != ABSENT])) == (more != ABSENT).sum()
    kept = keys[:100_000][first != ABSENT]
    assert (table.find(kept) != ABSENT).all()


def test_keys_that_all_want_the_same_two_buckets_are_refused_beyond_their_slots() -> None:
    # Equal high parts of both halves: the same buckets.
    keys = np.arange(1, 101, dtype=np.uint64)
    slots, _ = Table(1_000_000).add(keys)
    assert (slots != ABSENT).sum() in (8, 16)
