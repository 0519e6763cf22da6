"""Requests a second, and what one more costs the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.pricing.cut import HORIZON_S, Queue, Traffic


@given(st.floats(0.1, 50.0))
def test_the_rate_is_that_of_the_last_minutes(rate: float) -> None:
    traffic = Traffic(0.0)
    now = 0.0
    while now < 4 * HORIZON_S:
        now += 1 / rate
        traffic.add(now)
    assert traffic.rate(now) == pytest.approx(rate, rel=0.1 + 1 / (rate * HORIZON_S))
    assert traffic.rate(now + HORIZON_S) < rate / 2


def test_two_requests_at_the_begin_are_no_crowd() -> None:
    traffic = Traffic(100.0)
    traffic.add(100.0)
    traffic.add(100.0)
    assert traffic.rate(100.0) < 0.5


@given(st.floats(0, 100), st.floats(0, 20), st.floats(0, 10), st.floats(0, 10))
def test_more_work_costs_more(wait_s: float, rate: float, work_s: float, more_s: float) -> None:
    queue = Queue(wait_s, rate)
    assert 0 <= queue.cost_to_others(work_s) <= queue.cost_to_others(work_s + more_s)
