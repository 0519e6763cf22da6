"""A histogram: its quantiles, and the doublings that the status document shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.counter import Histogram

seconds = st.lists(st.floats(1e-6, 100.0), min_size=1, max_size=200)


@given(seconds, st.sampled_from([0.5, 0.99, 1.0]))
def test_quantiles_are_right_to_a_tenth(values: list[float], q: float) -> None:
    histogram = Histogram(1e-6, 28)
    for value in values:
        histogram.add(value)
    ranked = sorted(values)
    low = ranked[max(int(q * len(ranked)) - 1, 0)]
    high = ranked[min(int(q * len(ranked)) + 1, len(ranked) - 1)]
    assert low * 0.9 <= histogram.quantile(q) <= high * 1.1


@given(st.lists(st.floats(0.0, 1e9), max_size=100), st.sampled_from([1e-5, 1e-4, 1.0]), st.integers(1, 30))
def test_each_value_is_counted_in_its_doubling(values: list[float], first: float, octaves: int) -> None:
    histogram = Histogram(first, octaves)
    for value in values:
        histogram.add(value)
    shown = histogram.octaves()
    assert shown["first"] == first
    assert len(shown["counts"]) == octaves
    assert sum(shown["counts"]) == histogram.count == len(values)
    assert shown["sum"] == pytest.approx(sum(values), rel=1e-12)
    for index in range(octaves - 1):
        bound = first * 2 ** (index + 1)
        near = sum(abs(value - bound) <= bound * 1e-9 for value in values)
        below = sum(value < bound for value in values)
        assert abs(sum(shown["counts"][: index + 1]) - below) <= near
