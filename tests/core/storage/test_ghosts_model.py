"""The ghosts and the capacity curve against models."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframework.storage.l1.allocator import ALIGNMENT
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l1.eviction_statistics import CapacityCurve, Cause, EvictionStatistics
from tests.core.storage.memory import packed_key

numbers = st.integers(0, 40)


@given(most=st.integers(0, 20), moves=st.lists(st.tuples(st.sampled_from(["left", "lost", "back"]), numbers)))
def test_the_newer_half_is_there_and_each_ghost_is_what_was_said(most: int, moves: list[tuple[str, int]]) -> None:
    now = [0.0]
    found, model = EvictionStatistics(1 << 20, most, lambda _: "m", lambda: now[0]), dict[int, tuple[Cause, float]]()
    added: dict[int, None] = {}  # in the order of their last addition, also of those that are back
    for move, number in moves:
        now[0] += 1.0
        key = packed_key(number)
        model.pop(number, None)
        match move:
            case "left" if found.ghost(key) is None:
                found.left(StoredObject(key, 0, ALIGNMENT), Cause.ROOM)
                model[number] = Cause.ROOM, now[0]
            case "lost":
                found.lost([key], Cause.REFUSED)
                model[number] = Cause.REFUSED, now[0]
            case _:
                found.back([key])
                assert found.ghost(key) is None
        if number in model:
            added.pop(number, None)
            added[number] = None
        newest = list(added)[-(most // 2) or len(added) :]
        assert all(found.ghost(packed_key(each)) is not None for each in newest if each in model)
    ghosts = {number: found.ghost(packed_key(number)) for number in range(41)}
    assert sum(ghost is not None for ghost in ghosts.values()) <= most + 1
    for number, ghost in ghosts.items():
        assert ghost is None or ghost[:2] == model[number]


@pytest.mark.parametrize("capacity", [32, 512])
@settings(max_examples=60, deadline=None)
@given(moves=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), max_size=200))
def test_a_capacity_holds_what_left_last_and_did_not_come_back(capacity: int, moves: list[tuple[int, int]]) -> None:
    curve = CapacityCurve(capacity)
    there: list[tuple[int, int]] = []
    for nbytes, back in moves:
        there.append((curve.evicted(nbytes), nbytes))
        if back < len(there):
            curve.back(*there.pop(-1 - back))
    larger = [capacity * (2 ** (step / 4) - 1) for step in range(13)]
    slack = 2 * (capacity // 32) + 6
    below = 0
    for segment, nbytes in reversed(there):
        below += nbytes
        step = curve.missed(segment, 1, 0)
        if step < 0:
            assert below > larger[-1] - slack
        else:
            assert below <= larger[step + 1] + slack
            assert step == 0 or below > larger[step] - slack
        assert curve.missed(math.inf, 1, 3) == 3, "what is here"


def test_the_oldest_segments_are_forgotten() -> None:
    curve = CapacityCurve(32)
    first = curve.evicted(1)
    for _ in range(4000):
        last = curve.evicted(1)
    assert curve.missed(first, 1, 0) == -1
    steps = [curve.missed(last - at, 0, 0) for at in range(300)]
    curve.back(first, 1)
    last = curve.evicted(1)
    assert [curve.missed(last - at, 0, 0) for at in range(300)] == steps
    assert [row["capacity_bytes"] for row in curve.rates(32)] == [32, 38, 45, 54, 64]
