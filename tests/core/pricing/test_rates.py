"""A learned price: near the truth, never far from it after one absurd sample, and it follows what changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.pricing import LEAST, MOST, SEEDS, LearnedPrice, context_area, prefill_s

prices = st.floats(1e-9, 1e-3)
amounts = st.floats(1.0, 1e9)


def learned(price: float, amount: float = 1000.0, samples: int = 40, *, begin: float = 0.0) -> LearnedPrice:
    """A price after as many samples, one a second."""
    found = LearnedPrice()
    more(found, price, amount, samples, begin=begin)
    return found


def more(found: LearnedPrice, price: float, amount: float, samples: int, *, begin: float) -> None:
    for number in range(samples):
        now = begin + number + 1.0
        found.add(price * amount, amount, began=now - 0.5, now=now)


def of(found: LearnedPrice) -> float:
    assert found.prices is not None
    return found.prices[0]


def expected(found: LearnedPrice, first: float, second: float) -> float:
    assert found.prices is not None
    return found.prices[0] * first + found.prices[1] * second


@given(prices, amounts)
def test_it_is_unknown_at_first_and_then_the_truth(price: float, amount: float) -> None:
    found = LearnedPrice()
    for number in range(SEEDS):
        assert found.prices is None
        more(found, price, amount, 1, begin=number)
    assert of(found) == pytest.approx(price)


@given(prices, st.floats(0.0, 1e6), st.floats(1e-3, 1e3), st.integers(SEEDS, 60))
def test_one_absurd_sample_moves_it_little_and_is_forgotten(
    price: float, seconds: float, size: float, samples: int
) -> None:
    found = learned(price, samples=samples)
    found.add(seconds, 1000.0 * size, began=samples, now=samples + 1.0)
    assert price * 0.75 <= of(found) <= price * 1.7501
    more(found, price, 1000.0, 200, begin=samples + 1.0)
    assert of(found) == pytest.approx(price, rel=0.05)


@given(prices, st.integers(2, 8))
def test_what_a_pause_spoils_at_once_is_one_surprise(price: float, at_once: int) -> None:
    found = learned(price)
    for number in range(at_once):  # all were under way when the machine stood still
        found.add(price * 1000 + 30.0, 1000.0, began=40.0, now=70.5 + number * 1e-3)
    assert of(found) <= price * 1.7501
    more(found, price, 1000.0, 100, begin=71.0)
    assert of(found) == pytest.approx(price, rel=0.1)


@given(prices, st.sampled_from([0.02, 0.2, 5.0, 50.0]))
def test_a_change_is_learned_from_three_samples(price: float, factor: float) -> None:
    found = learned(price)
    more(found, price * factor, 1000.0, SEEDS, begin=50.0)
    assert of(found) == pytest.approx(price * factor, rel=0.01)


@given(prices, st.floats(0.5, 2.0), st.lists(st.floats(0.6, 1.6), min_size=8, max_size=60))
def test_it_lies_between_its_samples(price: float, size: float, ratios: list[float]) -> None:
    found = LearnedPrice()
    for number, ratio in enumerate(ratios):
        found.add(price * ratio * size, size, began=number, now=number + 1.0)
    assert price * min(ratios) * 0.999 <= of(found) <= price * max(ratios) * 1.001


@given(
    st.floats(1e3, 1e5),
    st.floats(5e3, 1e5),
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 100_000)), min_size=12, max_size=60),
)
def test_the_speed_and_the_attention_of_an_engine_are_told_apart(
    tokens_per_s: float, attention: float, steps: list[tuple[int, int]]
) -> None:
    found = LearnedPrice()
    spread = [(4096, 0), (4096, 50_000)] * 60
    for number, (tokens, context) in enumerate([*steps, *spread]):
        end = context + tokens
        seconds = prefill_s(context, end, tokens_per_s, attention)
        found.add(seconds, tokens, context_area(context, end), began=number, now=number + 1.0)
    for tokens, context in spread:
        end = context + tokens
        seconds = prefill_s(context, end, tokens_per_s, attention)
        assert expected(found, tokens, context_area(context, end)) == pytest.approx(seconds, rel=0.3)


@given(st.lists(st.tuples(*[st.floats() | st.floats(0, 1e12)] * 3, st.floats(0, 1e3)), max_size=40))
def test_it_never_leaves_its_bounds(samples: list[tuple[float, float, float, float]]) -> None:
    found, now = LearnedPrice(), 0.0
    for seconds, first, second, later in samples:
        now += later
        found.add(seconds, first, second, began=now, now=now)
        if found.prices is not None:
            assert LEAST <= found.prices[0] <= MOST
            assert 0.0 <= found.prices[1] <= MOST
