"""The order of measurements, and the statistics against their definitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework_bench.rounds import (
    Case,
    Latency,
    Spread,
    interleave,
    measure_quiet_and_disturbed,
    percentile,
    rate_gb_s,
    ratio,
)

SECONDS = st.floats(min_value=1e-6, max_value=100)


@given(st.lists(SECONDS, min_size=1), st.floats(min_value=0, max_value=1))
def test_a_percentile_is_the_smallest_value_that_covers_its_fraction(values: list[float], fraction: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, fraction)
    assert found in ordered
    assert sum(value <= found for value in ordered) >= fraction * len(ordered)
    assert found == ordered[0] or sum(value < found for value in ordered) < fraction * len(ordered)


def test_percentiles_of_a_hundred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50, 99, 100)


def test_latency_counts_all_samples_of_all_rounds() -> None:
    latency = Latency.of([[3e-6, 1e-6], [2e-6]])
    assert latency.samples == 3
    assert (latency.p50_us, latency.p99_us, latency.max_us) == pytest.approx((2, 3, 3))


def test_a_rate_is_bytes_by_seconds() -> None:
    spread = rate_gb_s(2_000_000_000, [[1.0], [4.0], [2.0]])
    assert (spread.min, spread.median, spread.max) == pytest.approx((0.5, 1.0, 2.0))


@given(st.lists(st.tuples(SECONDS, st.floats(min_value=0.1, max_value=10)), min_size=1), SECONDS)
def test_a_drift_of_the_machine_cancels_in_a_ratio(rounds: list[tuple[float, float]], base: float) -> None:
    """Both cases of a round are slowed down alike; their ratio stays what it is."""
    measured = [[3 * base * slow] for _, slow in rounds]
    reference = [[base * slow] for _, slow in rounds]
    assert ratio(measured, reference).min == pytest.approx(3)
    assert ratio(measured, reference).max == pytest.approx(3)


def test_a_ratio_takes_the_median_of_each_round() -> None:
    assert ratio([[1.0, 2.0, 99.0], [6.0]], [[1.0], [2.0]]) == Spread(2.0, 2.5, 3.0)


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError):
        ratio([[1.0]], [[1.0], [2.0]])


def test_nothing_has_no_statistics() -> None:
    with pytest.raises(ValueError):
        percentile([], 0.5)
    with pytest.raises(ValueError):
        Spread.of([])


def test_every_round_measures_every_case_and_every_other_one_goes_backwards() -> None:
    order: list[str] = []

    def case(name: str, seconds: float) -> Case:
        def run() -> float:
            order.append(name)
            return seconds

        return run

    steps: list[None] = []
    measured = interleave(
        {"a": case("a", 1.0), "b": case("b", 2.0)}, rounds=3, calls=2, advance=lambda: steps.append(None)
    )
    assert "".join(order) == "aabbbbaaaabb"
    assert measured == {"a": [[1.0, 1.0]] * 3, "b": [[2.0, 2.0]] * 3}
    assert len(steps) == 3


class Switch:
    """A disturbance that records its calls."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []

    def begin(self) -> None:
        self.on = True

    def end(self) -> None:
        self.on = False

    def case(self, name: str, seconds: float) -> Callable[[], float]:
        def run() -> float:
            self.seen.append(f"{name} {self.on}")
            return seconds * (10 if self.on else 1)

        return run


def test_every_round_has_a_quiet_and_a_disturbed_half() -> None:
    switch = Switch()

    def round_is_over() -> None:
        assert not switch.on
        switch.seen.append("over")

    cases = {"a": switch.case("a", 1), "b": switch.case("b", 2)}
    quiet, disturbed = measure_quiet_and_disturbed(switch, cases, rounds=2, advance=round_is_over)
    there = ["a False", "b False", "a True", "b True"]
    assert switch.seen == [*there, "over", *reversed(there), "over"]
    assert quiet == {"a": [[1], [1]], "b": [[2], [2]]}
    assert disturbed == {"a": [[10], [10]], "b": [[20], [20]]}
