"""The circuit breaker against a model of a few lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvframework.storage.breaker import Breaker

actions = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0, 8.0])),
        st.tuples(st.sampled_from(["call", "good", "bad"]), st.just(0.0)),
    ),
    max_size=60,
)


@given(actions)
def test_lets_calls_through_as_the_model_says(script: list[tuple[str, float]]) -> None:
    """Calls may end in any order: "good" and "bad" end one that was let through, whenever that was."""
    breaker = Breaker(threshold=3, backoff_s=1.0, max_backoff_s=4.0)
    now, in_flight = 0.0, 0
    failures, retry_at, backoff, mode = 0, 0.0, 1.0, "closed"
    for action, seconds in script:
        if action == "wait":
            now += seconds
        elif action == "call":
            passes = mode == "closed" or (mode == "open" and now >= retry_at)
            assert breaker.allow(now) is passes
            in_flight += passes
            if passes and mode == "open":
                mode = "half-open"
        elif in_flight and action == "good":
            in_flight -= 1
            breaker.succeeded()
            failures, backoff, mode = 0, 1.0, "closed"
        elif in_flight:
            in_flight -= 1
            breaker.failed(now)
            failures += 1
            if mode == "half-open":
                backoff = min(backoff * 2, 4.0)
            if mode == "half-open" or failures >= 3:
                mode, retry_at = "open", now + backoff
        assert breaker.state == mode
        wait_s = breaker.wait_s(now)
        if mode == "closed" or (mode == "open" and now >= retry_at):
            assert wait_s == 0
        else:
            assert wait_s > 0, "a caller that waits as told would spin"
        if mode == "open":
            assert now + wait_s >= retry_at


def test_one_call_decides_when_half_open() -> None:
    breaker = Breaker(threshold=1, backoff_s=1.0)
    breaker.failed(0.0)
    assert not breaker.allow(0.9)
    assert breaker.allow(1.0)
    assert not breaker.allow(1.0)
    breaker.succeeded()
    assert breaker.allow(1.0)
    assert breaker.allow(1.0)


def test_the_pause_doubles_up_to_its_bound_and_is_forgotten_after_a_success() -> None:
    breaker = Breaker(threshold=1, backoff_s=1.0, max_backoff_s=4.0)
    now, pauses = 0.0, []
    breaker.failed(now)
    for _ in range(4):
        pauses.append(breaker.wait_s(now))
        now += pauses[-1]
        assert breaker.allow(now)
        breaker.failed(now)
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    now += breaker.wait_s(now)
    assert breaker.allow(now)
    breaker.succeeded()
    breaker.failed(now)
    assert breaker.wait_s(now) == 1.0


def test_failures_count_only_in_a_row() -> None:
    breaker = Breaker(threshold=2)
    for _ in range(5):
        breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state == "closed"


def test_a_call_that_proves_nothing_leaves_the_decision_to_the_next() -> None:
    breaker = Breaker(threshold=2, backoff_s=1.0)
    for now in (0.0, 0.5):
        breaker.undecided()
        breaker.failed(now)
    assert breaker.state == "open", "it does not interrupt a row of failures"
    assert breaker.allow(1.5)
    breaker.undecided()
    assert breaker.state == "half-open"
    assert breaker.wait_s(1.5) == 0
    assert breaker.allow(1.5)
    assert not breaker.allow(1.5)
    breaker.failed(1.5)
    assert breaker.wait_s(1.5) == 2.0
