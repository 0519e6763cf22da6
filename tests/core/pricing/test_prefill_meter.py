"""What an engine says of itself is what its steps were, however they overlap, and it says nothing before it knows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.pricing import PrefillMeter, prefill_s

SPEED, ATTENTION = 20_000.0, 16_384.0


def stepped(meter: PrefillMeter, parts: list[tuple[int, int]], now: float) -> float:
    """One step that computes them, from now on; return its end."""
    meter.begin_step(parts, now)
    end = now + sum(prefill_s(*part, SPEED, ATTENTION) for part in parts)
    meter.end_step(end)
    return end


def chunked(meter: PrefillMeter, prompts: int = 4, now: float = 0.0) -> float:
    for _ in range(prompts):
        for first in range(0, 32_768, 4096):
            now = stepped(meter, [(first, first + 4096)], now)
        now += 5.0  # the engine stands idle
    return now


def test_it_is_known_after_some_prompts() -> None:
    meter = PrefillMeter()
    assert meter.speed([]) is None
    chunked(meter)
    speed = meter.speed([(1024, 9216), (512, 600)])
    assert speed is not None
    assert speed.tokens_per_s == pytest.approx(SPEED, rel=0.01)
    assert speed.attention_tokens == pytest.approx(ATTENTION, rel=0.02)
    expected = prefill_s(1024, 9216, SPEED, ATTENTION) + prefill_s(512, 600, SPEED, ATTENTION)
    assert speed.queued_s == pytest.approx(expected, rel=0.02)
    speed.check()


def test_steps_that_overlap_are_not_counted_twice() -> None:
    meter, begin, end = PrefillMeter(), 0.0, 0.0
    step_s = prefill_s(0, 4096, SPEED)
    meter.begin_step([(0, 4096)], begin)
    for _ in range(20):  # the next step is scheduled before the one under way has ended
        meter.begin_step([(0, 4096)], end + 0.01)
        end += step_s
        meter.end_step(end)
    speed = meter.speed([])
    assert speed is not None
    assert speed.tokens_per_s == pytest.approx(SPEED, rel=0.01)


def test_what_is_not_prefill_says_nothing() -> None:
    meter = PrefillMeter()
    for number in range(50):
        meter.begin_step([(5000, 5001)] * 64, number)
        meter.end_step(number + 0.02)
        meter.begin_step([(0, 4096)], number + 0.1, counts=False)
        meter.end_step(number + 0.9)
        meter.end_step(number + 0.95)  # of no step
    assert meter.speed([(0, 100)]) is None


def test_a_stopped_machine_is_forgotten() -> None:
    meter = PrefillMeter()
    now = chunked(meter)
    meter.begin_step([(0, 4096)], now)
    meter.end_step(now + 30.0)
    speed = meter.speed([])
    assert speed is not None
    assert speed.prefill_s(0, 32_768) < 1.8 * prefill_s(0, 32_768, SPEED, ATTENTION)
    chunked(meter, 25, now + 30.0)
    speed = meter.speed([])
    assert speed is not None
    assert speed.tokens_per_s == pytest.approx(SPEED, rel=0.05)


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20)), max_size=4),
            st.floats(0, 1e9),
        ),
        max_size=30,
    ),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20)), max_size=4),
)
def test_it_never_says_what_a_server_refuses(
    steps: list[tuple[list[tuple[int, int]], float]], queued: list[tuple[int, int]]
) -> None:
    meter, now = PrefillMeter(), 0.0
    for parts, seconds in steps:
        meter.begin_step(parts, now)
        now += seconds
        meter.end_step(now)
    speed = meter.speed(queued)
    if speed is not None:
        speed.check()
