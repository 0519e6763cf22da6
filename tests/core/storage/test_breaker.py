"""The circuit breaker against a model of a few lines. What a tier lacked, against a model: nothing that was written
here is taken for absent, nothing is for long."""

from __future__ import annotations

import gc
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvframework.errors import DeviceError, TierError
from kvframework.storage.l2.tier_calls import Absences, Breaker, TierCalls

actions = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0, 8.0])),
        st.tuples(st.sampled_from(["call", "good", "bad", "undecided"]), st.integers(0, 9)),
    ),
    max_size=60,
)


@given(actions)
def test_lets_calls_through_as_the_model_says(script: list[tuple[str, float]]) -> None:
    """Calls may end in any order; those from before the circuit opened say nothing."""
    breaker = Breaker(threshold=3, backoff_s=1.0, max_backoff_s=4.0)
    now = 0.0
    in_flight: list[tuple[int, int]] = []
    failures, retry_at, backoff, mode, opened, probing = 0, 0.0, 1.0, "closed", 0, False
    for action, number in script:
        if action == "wait":
            now += number
        elif action == "call":
            passes = mode == "closed" or (now >= retry_at and not probing)
            call = breaker.allow(now)
            assert (call is not None) is passes
            if call is not None:
                in_flight.append((call, opened))
                if mode != "closed":
                    mode, probing = "half-open", True
        elif in_flight:
            call, then = in_flight.pop(int(number) % len(in_flight))
            if action == "good":
                breaker.succeeded(call, now)
            elif action == "bad":
                breaker.failed(call, now)
            else:
                breaker.undecided(call)
            if then != opened:
                pass
            elif action == "good":
                failures, backoff, mode, probing = 0, 1.0, "closed", False
            elif action == "undecided":
                probing = False
            else:
                failures += 1
                if mode == "half-open":
                    backoff = min(backoff * 2, 4.0)
                if mode == "half-open" or failures >= 3:
                    mode, probing, retry_at, opened = "open", False, now + backoff, opened + 1
        assert breaker.state == mode
        wait_s = breaker.wait_s(now)
        if mode == "closed" or (now >= retry_at and not probing):
            assert wait_s == 0
        else:
            assert wait_s > 0, "a caller that waits as told would spin"
        if mode == "open":
            assert now + wait_s >= retry_at


def fail(breaker: Breaker, now: float) -> None:
    call = breaker.allow(now)
    assert call is not None
    breaker.failed(call, now)


def succeed(breaker: Breaker, now: float) -> None:
    call = breaker.allow(now)
    assert call is not None
    breaker.succeeded(call, now)


def test_it_tells_since_when_it_is_closed_or_not() -> None:
    breaker = Breaker(threshold=2, backoff_s=1.0)
    for now in (3.0, 4.0, 5.0, 7.0):
        fail(breaker, now)
    assert breaker.since == 4.0, "each probe that fails does not begin it again"
    succeed(breaker, 11.0)
    assert breaker.since == 11.0
    succeed(breaker, 12.0)
    assert breaker.since == 11.0


def test_writes_that_fail_delay_no_read() -> None:
    """The two circuits of a tier share nothing."""
    now = 0.0
    calls = TierCalls("tier", 1.0, Breaker(threshold=1, backoff_s=1.0, max_backoff_s=60.0), lambda: now)

    def fail(name: str) -> None:
        def no_room(_deadline: float) -> None:
            raise TierError("no room")

        with pytest.raises(TierError):
            calls.call(name, no_room)

    for _ in range(5):
        fail("put")
        now += calls.wait_s("put")
    fail("get_into")
    assert calls.wait_s("get_into") == 1.0


@pytest.mark.parametrize("raised", [TierError("down"), DeviceError("lost")], ids=lambda error: type(error).__name__)
def test_a_call_that_failed_lets_go_of_its_values(raised: Exception) -> None:
    """Not when Python next looks for cycles: until then the arena could not be freed."""
    calls = TierCalls("tier", 1.0, Breaker(threshold=9, backoff_s=1.0, max_backoff_s=60.0), time.monotonic)
    arena = bytearray(8)

    def put(value: memoryview) -> None:
        def operation(_deadline: float) -> None:
            assert value.nbytes == 8
            raise raised

        with pytest.raises(TierError):
            calls.call("put", operation)

    gc.disable()
    try:
        put(memoryview(arena))
        raised.__traceback__ = None
        arena.clear()  # a BufferError while there is a view of it
    finally:
        gc.enable()


HOLD_S = 2.0
MOST = 6
KEYS = [bytes([number]) * 72 for number in range(9)]
some_keys = st.lists(st.sampled_from(KEYS), unique=True, max_size=5)


class AbsencesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.absences = Absences(HOLD_S, MOST)
        self.now = 0.0
        # The turn in which each key was last written here, in which each question began, and of each answer its time.
        self.turn = 0
        self.written: dict[bytes, int] = {}
        self.under_way: list[tuple[int, int]] = []
        self.told: dict[bytes, tuple[int, float]] = {}

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def ask(self) -> None:
        self.turn += 1
        self.under_way.append((self.absences.writes, self.turn))

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 1 << 16), missing=some_keys)
    def answer(self, which: int, missing: list[bytes]) -> None:
        writes, began = self.under_way.pop(which % len(self.under_way))
        self.absences.answered(missing, writes, self.now)
        for key in missing:
            if self.written.get(key, -1) < began:
                self.told[key] = (began, self.now)

    @rule(keys=some_keys)
    def write(self, keys: list[bytes]) -> None:
        self.turn += 1
        self.absences.written(keys)
        for key in keys:
            self.written[key] = self.turn
            self.told.pop(key, None)

    @rule(missing=some_keys)
    def one_answer_is_remembered_at_once(self, missing: list[bytes]) -> None:
        self.turn += 1
        self.absences.answered(missing, self.absences.writes, self.now)
        for key in missing:
            self.told[key] = (self.turn, self.now)
            assert self.absences.lacked(key, self.now)

    @invariant()
    def what_is_remembered_was_told_lately(self) -> None:
        for key in KEYS:
            if self.absences.lacked(key, self.now):
                began, at = self.told[key]
                assert self.written.get(key, -1) < began
                assert self.now < at + HOLD_S
        assert len(self.absences) <= MOST


TestAbsences = AbsencesMachine.TestCase
