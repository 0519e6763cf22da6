"""The ghosts and the stack of evicted bytes against models."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvframework.storage.l1.eviction_statistics import GHOST_BYTES, WAYS, Cause, EvictedStack, Ghosts
from tests.core.storage.memory import packed_key

numbers = st.integers(0, 2 * WAYS)
bytes_ = st.integers(0, 255)


@dataclass
class Known:
    cause: Cause
    at: float
    by: int
    place: int
    units: int
    wanted: bool = False


class GhostsMachine(RuleBasedStateMachine):
    """One set, so that the model knows which ghost is forgotten: the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self.ghosts = Ghosts(1)
        self.model: dict[int, Known] = {}
        self.now = 0.0

    @rule(number=numbers, cause=st.sampled_from(Cause), by=bytes_, place=st.integers(0, 1 << 40), units=bytes_)
    def left(self, number: int, cause: Cause, by: int, place: int, units: int) -> None:
        if number in self.model:
            return
        self.now += 1
        self.ghosts.left(packed_key(number), cause, self.now, 0.5, by, place, units)
        self.model[number] = Known(cause, self.now, by, place, units)
        if len(self.model) > WAYS:
            del self.model[next(iter(self.model))]

    @rule(number=numbers)
    def forget(self, number: int) -> None:
        slot = self.ghosts.slot(packed_key(number))
        known = self.model.pop(number, None)
        if known is not None:
            assert self.ghosts.forget(slot) == (known.place, known.units)

    @rule(number=numbers)
    def want(self, number: int) -> None:
        known = self.model.get(number)
        if known is not None:
            self.now += 1
            after = self.ghosts.want(self.ghosts.slot(packed_key(number)), self.now)
            assert after == (None if known.wanted or not known.place else self.now - known.at)
            known.wanted = True

    @invariant()
    def agrees(self) -> None:
        assert self.ghosts.held == len(self.model)
        for number in range(2 * WAYS + 1):
            slot = self.ghosts.slot(packed_key(number))
            known = self.model.get(number)
            assert (slot >= 0) == (known is not None)
            if known is not None:
                assert self.ghosts.facts(slot) == (known.cause, known.at, 0.5, known.by)
                assert self.ghosts.place(slot) == known.place


TestGhosts = GhostsMachine.TestCase
TestGhosts.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)


def test_the_newer_half_of_a_full_table_is_there_and_its_size_is_what_it_says() -> None:
    ghosts = Ghosts(3000)
    assert (ghosts.most, ghosts.nbytes) == (4096, 4096 * GHOST_BYTES + 4096 // WAYS)
    for number in range(3 * ghosts.most):
        ghosts.left(packed_key(number), Cause.ROOM, 0.0)
    newer = range(3 * ghosts.most - ghosts.most // 2, 3 * ghosts.most)
    lost = sum(ghosts.slot(packed_key(number)) < 0 for number in newer)
    assert lost < ghosts.most // 2 * 0.03
    assert ghosts.held <= ghosts.most


def test_no_ghosts() -> None:
    ghosts = Ghosts(0)
    ghosts.left(packed_key(1), Cause.ROOM, 0.0)
    assert (ghosts.most, ghosts.nbytes, ghosts.held, ghosts.slot(packed_key(1))) == (0, 0, 0, -1)


@pytest.mark.parametrize(("segment", "most"), [(1, 1000), (16, 1000), (16, 12)])
def test_the_depth_of_what_left_is_what_left_after_it_and_did_not_come_back(
    segment: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvframework.storage.l1.eviction_statistics._MOST_SEGMENTS", most)

    @settings(max_examples=60, deadline=None)
    @given(moves=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=120))
    def check(moves: list[tuple[int, int]]) -> None:
        stack = EvictedStack(segment, reach=1000)
        there: list[tuple[int, int]] = []
        for units, back in moves:
            there.append((stack.push(units), units))
            if back < len(there):
                stack.take(*there.pop(-1 - back))
        depths = list(range(0, 200, 7))
        places = stack.places(depths)
        assert places == sorted(places, reverse=True)
        slack = 2 * segment + 5
        below = 0
        for place, units in reversed(there):
            below += units
            for depth, oldest in zip(depths, places, strict=True):
                if below + slack <= depth:
                    assert place >= oldest
                elif below > depth + slack:
                    assert place < oldest

    check()


def test_what_is_beyond_the_reach_is_forgotten() -> None:
    stack = EvictedStack(4, reach=100)
    first = stack.push(1)
    for _ in range(4000):
        stack.push(1)
    (oldest,) = stack.places([1 << 30])
    assert first < oldest
    stack.take(first, 1)
    assert stack.places([1 << 30]) == [oldest]
