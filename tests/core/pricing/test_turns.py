"""Loads that take turns, against a tier that serves them in small slices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.pricing.cut import MOST_BUSY, Turns

SLICES = 200
works = st.lists(st.integers(0, SLICES), max_size=5)


def ends(left: list[int]) -> list[int]:
    """When each of these loads is over, if each gets a slice in its turn."""
    left, over, now = list(left), [0] * len(left), 0
    while any(left):
        for number, slices in enumerate(left):
            if slices:
                now += 1
                left[number] -= 1
                over[number] = now
    return over


@given(works, st.integers(1, SLICES))
def test_a_load_waits_for_each_as_long_as_itself(left: list[int], work: int) -> None:
    together, before = ends([*left, work]), ends(left)
    turns = Turns(left)
    assert turns.load_s(work) == pytest.approx(together[-1], abs=len(left))
    delays = sum(after - one for after, one in zip(together, before, strict=False))
    assert turns.cost_to_others(work) == pytest.approx(delays, abs=2 * len(left) + 1)


@given(works, st.floats(0, 10), st.floats(0, 5), st.floats(0, 100), st.floats(0, 100))
def test_more_takes_longer_and_costs_more(left: list[int], rate: float, busy: float, work: float, more: float) -> None:
    turns = Turns(left, rate, busy)
    assert work <= turns.load_s(work) <= turns.load_s(work + more) * (1 + 1e-9)
    assert 0 <= turns.cost_to_others(work) <= turns.cost_to_others(work + more) * (1 + 1e-9)
    assert turns.load_s(work) <= (sum(left) + work) / (1 - MOST_BUSY) * (1 + 1e-9)
