"""The ghosts and the stack of evicted bytes against models."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframework.storage.l1.eviction_statistics import Cause, EvictedStack, Facts, Ghosts
from tests.core.storage.memory import packed_key

numbers = st.integers(0, 40)


@given(most=st.integers(0, 20), moves=st.lists(st.tuples(st.sampled_from(["left", "back", "want"]), numbers)))
def test_the_newer_half_is_there_and_each_ghost_is_what_was_said(most: int, moves: list[tuple[str, int]]) -> None:
    ghosts, model = Ghosts(most), dict[int, bool]()
    left: list[int] = []
    for at, (move, number) in enumerate(moves):
        key = packed_key(number)
        known = ghosts.get(key)
        if known is None:
            model.pop(number, None)
        match move:
            case "left" if known is None:
                ghosts.add(key, Facts(Cause.ROOM, float(at), 0.5, "", number, 1))
                model[number] = False
                left.append(number)
            case "back" if known is not None:
                ghosts.forget(key)
                del model[number]
                assert ghosts.get(key) is None
            case "want" if known is not None:
                assert ghosts.want(key) == (*known[:-1], model[number])
                model[number] = True
        assert len(ghosts) <= most + 1
        newest = [each for each in left[-(most // 2) or len(left) :] if each in model]
        assert all(ghosts.get(packed_key(each)) is not None for each in newest)
    for number, wanted in model.items():
        facts = ghosts.get(packed_key(number))
        assert facts is None or (facts[4], facts[-1]) == (number, wanted)


@pytest.mark.parametrize("segment", [1, 16])
@settings(max_examples=60, deadline=None)
@given(moves=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=120))
def test_the_depth_of_what_left_is_what_left_after_it_and_did_not_come_back(
    segment: int, moves: list[tuple[int, int]]
) -> None:
    stack = EvictedStack(segment)
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


def test_the_oldest_segments_are_forgotten() -> None:
    stack = EvictedStack(4)
    first = stack.push(1)
    for _ in range(4000):
        stack.push(1)
    (oldest,) = stack.places([1 << 30])
    assert first < oldest
    stack.take(first, 1)
    assert stack.places([1 << 30]) == [oldest]
