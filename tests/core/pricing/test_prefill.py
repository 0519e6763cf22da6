"""The formula of prefill, and that no number of an engine is out of bounds."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.pricing.prefill import EngineSpeed, prefill_s

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
