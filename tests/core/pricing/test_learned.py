"""Learned speeds of tiers and engines: near the truth, not far from it after an absurd sample, and what changes is
followed; a tier's is what all calls bring together, an engine's what its steps were, however they overlap. Where a hit
is cut: at the cheapest place, and cheaper tiers load more; the formula of prefill; and that no number of an engine is
out of bounds."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.pricing import PROBE_S, RECENT, SEEDS, EngineSpeed, LearnedPrice, PrefillMeter, TierSpeed, cut

prices = st.floats(1e-9, 1e-3)


def of(found: LearnedPrice | TierSpeed) -> tuple[float, float]:
    price = found.price if isinstance(found, TierSpeed) else found
    assert price.prices is not None
    return price.prices


def more(found: LearnedPrice, price: float, samples: int, amount: float = 1000.0) -> LearnedPrice:
    for _ in range(samples):
        found.add(price * amount, amount)
    return found


@given(prices, st.floats(1.0, 1e9))
def test_it_is_unknown_at_first_and_then_the_truth(price: float, amount: float) -> None:
    found = more(LearnedPrice(), price, SEEDS - 1, amount)
    assert found.prices is None
    assert of(more(found, price, 1, amount)) == pytest.approx((price, 0.0))


@given(prices, st.lists(st.tuples(st.floats(0, 1e6), st.floats(1e-3, 1e3)), max_size=(RECENT - 1) // 2))
def test_a_few_absurd_samples_decide_nothing(price: float, absurd: list[tuple[float, float]]) -> None:
    found = more(LearnedPrice(), price, RECENT)
    for seconds, size in absurd:
        found.add(seconds, 1000.0 * size)
    assert of(found)[0] == pytest.approx(price)


@given(prices, st.sampled_from([0.02, 0.2, 5.0, 50.0]))
def test_a_change_is_learned_once_most_samples_are_of_it(price: float, factor: float) -> None:
    found = more(more(LearnedPrice(), price, RECENT), price * factor, RECENT // 2 + 1)
    assert of(found)[0] == pytest.approx(price * factor)


@given(st.floats(1e-11, 1e-7), st.floats(0.0, 50.0), st.permutations(range(RECENT)))
def test_what_each_call_takes_is_told_apart_from_the_bytes(byte_s: float, call: float, order: list[int]) -> None:
    found, call_s = LearnedPrice(), call * byte_s * (1 << 20)
    for size in [1 << 16 + each for each in order]:
        found.add(byte_s * size + call_s, size, 1.0)
    for size in (1 << 16, 1 << 26):
        first, second = of(found)
        assert first * size + second == pytest.approx(byte_s * size + call_s, rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 1e7), st.integers(0, 1 << 40), st.integers(0, 1 << 60)), max_size=40))
def test_a_price_is_never_negative_nor_nothing(samples: list[tuple[float, int, int]]) -> None:
    found = LearnedPrice()
    for seconds, first, second in samples:
        found.add(seconds, first, second)
        if found.prices is not None:
            assert found.prices[0] > 0
            assert found.prices[1] >= 0


# A tier.

BYTES = 1 << 24


@given(st.floats(1e6, 1e11), st.integers(1, 8), st.integers(4, 30))
def test_calls_at_once_share_a_tier(bytes_per_s: float, at_once: int, rounds: int) -> None:
    speed, now = TierSpeed(0.0), 0.0
    for _ in range(rounds):
        calls = [speed.begin(now) for _ in range(at_once)]
        now += at_once * BYTES / bytes_per_s
        for call in calls:
            speed.end(call, now, BYTES)
        now += 3.0  # the tier stands idle
    assert of(speed)[0] == pytest.approx(1 / bytes_per_s, rel=1e-3)


def test_what_brought_only_a_part_teaches_nothing() -> None:
    speed = TierSpeed(0.0)
    for number in range(10):
        speed.end(speed.begin(number), number + 0.5, 0)
    assert speed.price.prices is None
    assert speed.load_s(1e9, 1) == 0.0


def known_tier() -> TierSpeed:
    speed = TierSpeed(0.0)
    for number in range(RECENT):
        speed.end(speed.begin(number), number + 0.5, BYTES)
    return speed


def test_a_load_is_behind_the_bytes_that_wait() -> None:
    speed = known_tier()
    assert speed.load_s(BYTES, 1) == pytest.approx(0.5)
    speed.queued_bytes += 2 * BYTES
    assert speed.load_s(BYTES, 1) == pytest.approx(1.5)
    assert speed.load_s(0, 1) == 0.0


def test_a_probe_is_due_once_in_a_while_without_loads_and_alone_is_the_price() -> None:
    speed, now = known_tier(), float(RECENT)
    assert not speed.probes(now)
    now += PROBE_S
    assert speed.probes(now)
    assert not speed.probes(now + 1.0)
    assert speed.load_s(BYTES, 1) == pytest.approx(0.5), "until it has ended"
    assert speed.probes(now + PROBE_S), "it brought nothing"
    speed.end(speed.begin(now), now + 0.01, BYTES)
    assert speed.load_s(BYTES, 1) == pytest.approx(0.01)
    assert not speed.probes(now + 1.0)


# An engine.

TRUE = EngineSpeed(20_000.0, 16_384.0)


def chunked(meter: PrefillMeter, prompts: int = 4, now: float = 0.0) -> float:
    for _ in range(prompts):
        for first in range(0, 32_768, 4096):
            meter.begin_step([(first, first + 4096)], now)
            now += TRUE.prefill_s(first, first + 4096)
            meter.end_step(now)
        now += 5.0  # the engine stands idle
    return now


def test_an_engine_is_known_after_some_prompts_and_a_pause_is_forgotten() -> None:
    meter = PrefillMeter()
    assert meter.speed([]) is None
    now = chunked(meter)
    for _ in range(2):
        speed = meter.speed([(1024, 9216), (512, 600)])
        assert speed.tokens_per_s == pytest.approx(TRUE.tokens_per_s, rel=0.01)
        assert speed.attention_tokens == pytest.approx(TRUE.attention_tokens, rel=0.02)
        assert speed.queued_s == pytest.approx(TRUE.prefill_s(1024, 9216) + TRUE.prefill_s(512, 600), rel=0.02)
        speed.check()
        meter.begin_step([(0, 4096)], now)
        meter.end_step(now + 30.0)


def test_steps_that_overlap_are_not_counted_twice() -> None:
    meter, end = PrefillMeter(), 0.0
    meter.begin_step([(0, 4096)], end)
    for _ in range(20):  # the next step is scheduled before the one under way has ended
        meter.begin_step([(0, 4096)], end + 0.01)
        end += 0.2
        meter.end_step(end)
    speed = meter.speed([])
    assert speed.tokens_per_s == pytest.approx(4096 / 0.2, rel=0.01)


def test_what_is_not_prefill_says_nothing() -> None:
    meter = PrefillMeter()
    for number in range(50):
        meter.begin_step([(5000, 5001)] * 64, number)
        meter.end_step(number + 0.02)
        meter.begin_step([(0, 4096)], number + 0.1, counts=False)
        meter.end_step(number + 0.9)
        meter.end_step(number + 0.95)  # of no step
    assert meter.speed([(0, 100)]) is None


parts = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20)), max_size=4)


@given(st.lists(st.tuples(parts, st.floats(0, 1e9)), max_size=30), parts)
def test_an_engine_never_says_what_a_server_refuses(
    steps: list[tuple[list[tuple[int, int]], float]], queued: list[tuple[int, int]]
) -> None:
    meter, now = PrefillMeter(), 0.0
    for computed, seconds in steps:
        meter.begin_step(computed, now)
        now += seconds
        meter.end_step(now)
    speed = meter.speed(queued)
    if speed is not None:
        speed.check()


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
