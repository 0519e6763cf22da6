"""Where a hit is cut: never out of bounds, never dearer than all or nothing, and cheaper tiers load more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.pricing import MOST_CUTS, EngineSpeed, TierPart, Turns, cut

CHUNK = 256
chunk_counts = st.integers(0, 40)
waits = st.floats(0, 100)
rates = st.floats(0, 20)
speeds = st.builds(EngineSpeed, st.floats(100, 1e6), st.just(0.0) | st.floats(1, 1e5), waits)


@st.composite
def parts(draw: st.DrawFn, chunks: int) -> list[TierPart]:
    return [
        TierPart(
            Turns(draw(st.lists(waits, max_size=4)), draw(rates), draw(st.floats(0, 2))),
            [count * draw_s for count in range(chunks + 1)],
        )
        for draw_s in draw(st.lists(st.floats(0, 10), min_size=1, max_size=3))
    ]


def cost(tiers: list[TierPart], engine: EngineSpeed, rate: float, first: int, last: int, count: int) -> float:
    """The formula once more, word by word."""
    compute = engine.prefill_s(first + count * CHUNK, last)
    io = [tier.turns.load_s(tier.load_s[count]) for tier in tiers if tier.load_s[count]]
    others = compute * rate * (engine.queued_s + compute)
    others += sum(tier.turns.cost_to_others(tier.load_s[count]) for tier in tiers)
    return max([engine.queued_s, *io]) + compute + others


def whole(tiers: list[TierPart], engine: EngineSpeed, *, rate: float = 0.0, rest: int = 0) -> int:
    """The chunks that are loaded of a hit that the tiers have all of."""
    last = (len(tiers[0].load_s) - 1) * CHUNK + rest
    return cut(tiers, engine, wait_s=engine.queued_s, rate=rate, first=0, last=last, chunk_tokens=CHUNK).chunks


@given(st.data(), speeds, rates, chunk_counts, st.integers(0, 1000), st.integers(0, 10_000))
def test_it_is_the_cheapest(
    data: st.DataObject, engine: EngineSpeed, rate: float, chunks: int, begin: int, rest: int
) -> None:
    tiers = data.draw(parts(chunks))
    first = begin * CHUNK
    last = first + chunks * CHUNK + rest
    wait_s = engine.queued_s
    found = cut(tiers, engine, wait_s=wait_s, rate=rate, first=first, last=last, chunk_tokens=CHUNK)
    assert 0 <= found.chunks <= chunks
    prices = [cost(tiers, engine, rate, first, last, count) for count in range(chunks + 1)]
    chosen = prices[found.chunks]
    assert chosen <= min(prices[0], prices[-1]) * (1 + 1e-9)
    assert chosen == pytest.approx(min(prices))
    assert found.saved_s == pytest.approx(prices[-1] - chosen, abs=1e-6 * prices[-1])
    assert found.load_s >= 0
    assert found.compute_s > 0 or not chunks
    assert found.saved_s > 0 or found.chunks == chunks


@given(speeds, rates, st.integers(1, 200), st.floats(1e-6, 1.0), st.floats(1.0, 100.0))
def test_a_slower_tier_never_loads_more(
    engine: EngineSpeed, rate: float, chunks: int, chunk_s: float, slower: float
) -> None:
    def loaded(seconds: float) -> int:
        tiers = [TierPart(Turns(), [count * seconds for count in range(chunks + 1)])]
        return whole(tiers, engine, rate=rate)

    assert loaded(chunk_s * slower) <= loaded(chunk_s)


@given(speeds, rates, chunk_counts)
def test_what_costs_nothing_is_loaded(engine: EngineSpeed, rate: float, chunks: int) -> None:
    tiers = [TierPart(Turns(), [0.0] * (chunks + 1))]
    assert whole(tiers, engine, rate=rate, rest=1) == chunks


def test_what_is_loaded_while_the_engine_is_busy_costs_nothing() -> None:
    tiers = [TierPart(Turns(), [count * 0.1 for count in range(11)])]
    idle, busy = EngineSpeed(25_000), EngineSpeed(25_000, 0.0, 0.65)
    assert whole(tiers, idle) == 0
    assert whole(tiers, busy) == 6


def test_what_it_costs_others_counts() -> None:
    tiers = [TierPart(Turns((), 50.0), [count * 0.005 for count in range(11)])]
    engine = EngineSpeed(25_000)
    quiet = [TierPart(Turns(), tiers[0].load_s)]
    assert whole(quiet, engine) == 10
    assert whole(tiers, engine) < 10


def test_of_a_very_long_hit_some_cuts_are_priced() -> None:
    chunks = 20 * MOST_CUTS + 7
    tiers = [TierPart(Turns(), [count * 0.1 for count in range(chunks + 1)])]
    slow, quick = EngineSpeed(1.0), EngineSpeed(1e9)
    assert whole(tiers, slow) == chunks
    assert whole(tiers, quick) == 0
