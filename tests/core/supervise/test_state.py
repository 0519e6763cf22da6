"""When a process is started, killed and started again, against a model with a clock of its own. A function and its
options pass to another process by their names, or are refused with the reason."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvframework.api.plugin import ByteSize, Options, Secret
from kvframework.errors import PluginBroken
from kvframework.supervise.child import NamedCall
from kvframework.supervise.state import HEALTHY_S, Backoff, Life, Supervision, how_ended

FIRST_S, LONGEST_S, READY_S, STOP_S = 0.1, 10.0, 5.0, 1.0
PASSING = st.floats(0.01, 40.0, allow_nan=False)


def test_backoff_grows_to_its_bound_and_begins_anew_after_a_success() -> None:
    backoff = Backoff(FIRST_S, LONGEST_S)
    assert backoff.left(0.0) == 0.0
    waits, now = [], 0.0
    for _ in range(12):
        waits.append(backoff.delay(now))
        assert backoff.left(now) == pytest.approx(waits[-1])
        now = backoff.next_at
        assert backoff.left(now) == 0.0
    assert waits[:3] == pytest.approx([FIRST_S, 2 * FIRST_S, 4 * FIRST_S])
    assert waits[-1] == LONGEST_S
    backoff.reset()
    assert backoff.left(now) == 0.0
    assert backoff.delay(now) == FIRST_S


def test_a_process_that_got_ready_in_time_is_not_killed_until_it_does_not_stop() -> None:
    life = Life(0.0, READY_S)
    life.ready(READY_S - 1)
    assert not life.must_be_killed(1e9)
    life.stop(10.0, STOP_S)
    life.stop(10.5, STOP_S)
    assert not life.must_be_killed(10.9)
    assert life.must_be_killed(11.0), "a second call gives it no more time"
    assert not life.must_be_killed(12.0), "once"


def test_a_process_that_gets_ready_while_it_has_to_stop_still_has_to() -> None:
    life = Life(0.0, READY_S)
    life.stop(1.0, STOP_S)
    life.ready(1.5)
    assert life.must_be_killed(2.0)


def test_ends_have_words() -> None:
    assert how_ended(3) == "with status 3"
    assert how_ended(-9) == "by signal SIGKILL"
    assert how_ended(-40) == "by signal 40"


class Supervised(RuleBasedStateMachine):
    """A supervisor that does what `step` says, and a process that gets ready, ends or hangs as chance has it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.machine = Supervision(READY_S, Backoff(FIRST_S, LONGEST_S))
        self.wanted = self.closed = self.alive = self.killed = False
        self.kill_by = math.inf
        self.began = 0.0
        self.not_before, self.failures = -math.inf, 0

    @rule(seconds=PASSING)
    def time_passes(self, seconds: float) -> None:
        """Up to the next step that is due, as a supervisor that sleeps until then sees it."""
        due = self.machine.due
        self.now = min(self.now + seconds, max(due, self.now))
        start, kill = self.machine.must_start(self.now), self.machine.must_kill(self.now)
        assert (start or kill) == (self.now >= due), "due is exact"
        if start:
            assert self.wanted
            assert not self.alive
            assert not self.closed
            assert self.now >= self.not_before
            self.machine.started(self.now)
            self.wanted, self.alive, self.began = False, True, self.now
            self.kill_by = self.now + READY_S
        elif kill:
            assert self.alive
            assert self.now >= self.kill_by
            self.killed, self.kill_by = True, math.inf

    @rule()
    def somebody_wants_it(self) -> None:
        self.machine.want()
        self.wanted = self.wanted or not self.closed

    @precondition(lambda self: self.alive)
    @rule()
    def it_gets_ready(self) -> None:
        serving = self.machine.is_serving
        self.life.ready(self.now)
        if serving:
            self.kill_by = math.inf

    @precondition(lambda self: self.alive)
    @rule()
    def it_has_to_stop(self) -> None:
        self.life.stop(self.now, STOP_S)
        self.kill_by = min(self.kill_by, self.now + STOP_S)

    @precondition(lambda self: self.alive)
    @rule()
    def it_ends(self) -> None:
        self.machine.ended(self.now)
        self.alive = self.killed = False
        self.kill_by = math.inf
        self.failures = 1 if self.now - self.began >= HEALTHY_S else self.failures + 1
        self.not_before = self.now + min(FIRST_S * 2 ** (self.failures - 1), LONGEST_S)

    @precondition(lambda self: not self.closed)
    @rule()
    def it_is_closed(self) -> None:
        self.machine.close(self.now, STOP_S)
        self.closed, self.wanted = True, False
        if self.alive:
            self.kill_by = min(self.kill_by, self.now + STOP_S)

    @property
    def life(self) -> Life:
        assert self.machine.life is not None
        return self.machine.life

    @invariant()
    def nothing_waits_for_ever(self) -> None:
        assert (self.machine.life is not None) == self.alive
        assert self.machine.is_over == (self.closed and not self.alive)
        if self.alive:
            assert self.machine.due == pytest.approx(self.kill_by)
            ready = self.machine.is_serving and self.life.ready_at is not None
            assert self.killed or ready or self.machine.due < math.inf
        else:
            assert self.machine.due == (pytest.approx(self.not_before) if self.wanted else math.inf)


TestSupervised = Supervised.TestCase
TestSupervised.settings = settings(max_examples=100, stateful_step_count=50)


class Sizes(Options, frozen=True):
    first: ByteSize
    rest: tuple[ByteSize, ...] = ()
    word: Secret = "w"


class Holder(Options, frozen=True):
    thing: object = None


class Maker:
    @staticmethod
    def inside(options: Sizes) -> Sizes:
        return options


def make(options: Sizes) -> Sizes:
    return options


@pytest.mark.parametrize("function", [make, Maker, Maker.inside])
def test_it_is_found_again_with_equal_options(function: object) -> None:
    options = Sizes(ByteSize(5), (ByteSize(1 << 40),), "hidden")
    call = NamedCall.of(function, options, where="here")  # type: ignore[arg-type]
    assert "hidden" not in repr(call)
    found, received = msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=NamedCall).resolve()
    assert found is function
    assert received == options
    assert [type(each) for each in (received.first, *received.rest)] == [ByteSize, ByteSize]


def refused(function: object, options: object) -> PluginBroken:
    with pytest.raises(PluginBroken) as caught:
        NamedCall.of(function, options, where="here")  # type: ignore[arg-type]
    assert caught.value.where == "here"
    assert caught.value.hint
    return caught.value


def test_what_has_no_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.make = made = lambda options: options  # type: ignore[attr-defined]
    made.__module__, made.__qualname__ = "__main__", "make"
    monkeypatch.setitem(sys.modules, "__main__", main)
    for function in (lambda options: options, Maker().inside.__get__, made, 5):
        assert "cannot be found by its name" in refused(function, Sizes(ByteSize(1))).fact
    assert "make of __main__" in refused(made, Sizes(ByteSize(1))).fact


def test_options_that_cannot_be_sent_are_refused() -> None:
    assert refused(make, {"first": 1}).available == "a struct"
    assert "Holder cannot be sent to another process: Maker is not" in refused(make, Holder(Maker())).fact
    assert "Sizes cannot be sent to another process" in refused(make, Sizes("text")).fact  # type: ignore[arg-type]
