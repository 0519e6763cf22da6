"""Where a hit is cut: at the cheapest place, and cheaper tiers load more; the formula of prefill; and that no number of
an engine is out of bounds."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.pricing import EngineSpeed, cut

CHUNK = 256
seconds = st.floats(0, 100)
speeds = st.builds(EngineSpeed, st.floats(100, 1e6), st.just(0.0) | st.floats(1, 1e5), seconds)
tokens = st.integers(0, 1 << 20)


def whole(chunk_s: float, engine: EngineSpeed, chunks: int, *, rest: int = 0) -> int:
    """The chunks that are loaded of a hit that a tier has all of, which takes so long for each."""
    counts = range(chunks + 1)
    computed = [engine.prefill_s(count * CHUNK, chunks * CHUNK + rest) for count in counts]
    return cut(counts, [count * chunk_s for count in counts], computed, engine.queued_s).chunks


@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=40), seconds, st.integers(0, 1000))
def test_it_is_the_cheapest_and_of_equal_ones_the_longest(
    costs: list[tuple[float, float]], wait_s: float, begin: int
) -> None:
    load_s, compute_s = sorted(load for load, _ in costs), sorted((compute for _, compute in costs), reverse=True)
    chunks = range(begin, begin + len(costs))
    found = cut(chunks, load_s, compute_s, wait_s)
    totals = [max(load, wait_s) + compute for load, compute in zip(load_s, compute_s, strict=True)]
    assert totals[found.chunks - begin] == min(totals)
    assert min(totals) not in totals[found.chunks - begin + 1 :]
    assert found.found == chunks[-1]
    assert found.saved_s == totals[-1] - min(totals)
    first = found.chunks - begin if found.chunks < found.found else 0
    assert (found.load_s, found.compute_s) == (load_s[-1] - load_s[first], compute_s[first] - compute_s[-1])


@given(speeds, st.integers(1, 200), st.floats(1e-6, 1.0), st.floats(1.0, 100.0))
def test_a_slower_tier_never_loads_more(engine: EngineSpeed, chunks: int, chunk_s: float, slower: float) -> None:
    assert whole(chunk_s * slower, engine, chunks) <= whole(chunk_s, engine, chunks)
    assert whole(0.0, engine, chunks, rest=1) == chunks, "what costs nothing is loaded"


def test_what_is_loaded_while_the_engine_is_busy_costs_nothing() -> None:
    assert whole(0.1, EngineSpeed(25_000), 10) == 0
    assert whole(0.1, EngineSpeed(25_000, 0.0, 0.65), 10) == 6


@given(tokens, tokens, tokens, speeds)
def test_parts_of_a_prompt_add_up(a: int, b: int, c: int, engine: EngineSpeed) -> None:
    first, middle, last = sorted((a, b, c))
    parts = engine.prefill_s(first, middle) + engine.prefill_s(middle, last)
    assert engine.prefill_s(first, last) == pytest.approx(parts, rel=1e-9)
    assert engine.prefill_s(first, middle) >= 0


def test_the_formula() -> None:
    # 8,192 tokens behind 4,096, at 25,000 a second, and twice as slow at 30,000.
    expected = (8192 + (12288**2 - 4096**2) / 60_000) / 25_000
    assert EngineSpeed(25_000, 30_000).prefill_s(4096, 12288) == pytest.approx(expected)
    assert EngineSpeed(25_000).prefill_s(4096, 12288) == pytest.approx(8192 / 25_000)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 1e300])
@pytest.mark.parametrize("place", range(3))
def test_numbers_out_of_bounds_are_refused(bad: float, place: int) -> None:
    numbers = [25_000.0, 30_000.0, 1.0]
    EngineSpeed(*numbers).check()
    numbers[place] = bad
    speed, name = EngineSpeed(*numbers), EngineSpeed.__struct_fields__[place]
    with pytest.raises(ValueError, match=name):
        speed.check()
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.msgpack.decode(msgspec.msgpack.encode(speed), type=EngineSpeed)
    with pytest.raises(ValueError, match="tokens_per_s"):
        EngineSpeed(0.0).check()
