"""The formula of prefill, and that no number of an engine is out of bounds."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.pricing import HORIZON_S, MOST_BUSY, EngineSpeed, Traffic, Turns, prefill_s

tokens = st.integers(0, 1 << 20)


@given(tokens, tokens, tokens, st.floats(1, 1e6), st.just(0.0) | st.floats(1, 1e6))
def test_parts_add_up(a: int, b: int, c: int, tokens_per_s: float, attention: float) -> None:
    first, middle, last = sorted((a, b, c))
    whole = prefill_s(first, last, tokens_per_s, attention)
    parts = prefill_s(first, middle, tokens_per_s, attention) + prefill_s(middle, last, tokens_per_s, attention)
    assert whole == pytest.approx(parts, rel=1e-9)
    assert prefill_s(first, middle, tokens_per_s, attention) >= 0


def test_the_formula() -> None:
    # 8,192 tokens behind 4,096, at 25,000 a second, and twice as slow at 30,000.
    assert prefill_s(4096, 12288, 25_000, 30_000) == pytest.approx((8192 + (12288**2 - 4096**2) / 60_000) / 25_000)
    assert EngineSpeed(25_000).prefill_s(4096, 12288) == pytest.approx(8192 / 25_000)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 1e300])
@pytest.mark.parametrize("place", range(3))
def test_numbers_out_of_bounds_are_refused(bad: float, place: int) -> None:
    numbers = [25_000.0, 30_000.0, 1.0]
    numbers[place] = bad
    speed, name = EngineSpeed(*numbers), EngineSpeed.__struct_fields__[place]
    with pytest.raises(ValueError, match=name):
        speed.check()
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.msgpack.decode(msgspec.msgpack.encode(speed), type=EngineSpeed)


def test_an_engine_without_speed_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens_per_s"):
        EngineSpeed(0.0).check()
    EngineSpeed(25_000.0).check()


# Loads that take turns, against a tier that serves them in small slices.


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


# Requests a second, and what one more costs the others.


@given(st.floats(0.1, 50.0))
def test_the_rate_is_that_of_the_last_minutes(rate: float) -> None:
    traffic = Traffic(0.0)
    now = 0.0
    while now < 4 * HORIZON_S:
        now += 1 / rate
        traffic.add(now)
    assert traffic.rates(now)[0] == pytest.approx(rate, rel=0.1 + 1 / (rate * HORIZON_S))
    assert traffic.rates(now + HORIZON_S)[0] < rate / 2


def test_two_requests_at_the_begin_are_no_crowd() -> None:
    traffic = Traffic(100.0)
    traffic.add(100.0)
    traffic.add(100.0)
    assert traffic.rates(100.0)[0] < 0.5
