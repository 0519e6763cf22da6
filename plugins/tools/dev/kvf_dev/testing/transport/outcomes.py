"""The ends of transfers, as the transport kit's tests expect them: with a sentence for any other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvf_dev.testing.transport.engine import WRONG, KitEngine
from kvf_dev.testing.transport.node import PATIENCE_S
from kvframework.api.futures import Future
from kvframework.api.transport import LoadOutcome, StoreOutcome
from kvframework.client import RequestHashes
from kvframework.errors import DeadlineExceeded

# By kind of what a device notes: the promise that a driver broke.
_PROMISES = {
    "unordered": "a copy runs behind the work that it waits for, and before what waits for it: `record`, `wait`",
    "never_recorded": "an event is recorded before anyone waits for it: `record`, at each submit",
    "use_after_free": "memory is touched while it is allocated: `reached` is true once a copy is done",
    "use_after_close": "memory is closed once no copy touches it: `reached` is true once all before it is done",
    "wrong_device": "memory, streams and events belong to the device that they are made for",
    "wrong_process": "a handle is opened before it is used: `open`, `open_event`",
    "out_of_bounds": "a fragment lies in its allocation and in the arena: `copy`",
    "not_pinned": "`pin` registers the whole slice of the arena",
    "leaked_context": "all that a process opened ends with it",
}


def promise_of(problem: str) -> str:
    """Return what a device noted, behind the promise that it breaks."""
    promise = _PROMISES.get(problem.partition(":")[0])
    return f"{promise}; the device noted {problem}" if promise else f"the device noted {problem}"


class _FailedCopies(logging.Handler):
    """The last line in which a server of this process says why a copy failed."""

    line = ""
    # What the device noted since the test began; set by the fixture.
    problems: Callable[[], list[str]] = staticmethod(list)
    shown = False

    def emit(self, record: logging.LogRecord) -> None:
        if ": a copy failed: " in (line := record.getMessage()):
            self.line = line


_FAILED_COPIES = _FailedCopies(logging.WARNING)


@contextmanager
def failed_copies_noted(problems: Callable[[], list[str]] = list) -> Iterator[Callable[[], bool]]:
    """Have `must_succeed` show why a copy failed that failed meanwhile: an outcome does not carry it. `problems` are
    those that the device has noted; the value of the context says whether one was shown."""
    _FAILED_COPIES.line, _FAILED_COPIES.problems, _FAILED_COPIES.shown = "", problems, False
    log = logging.getLogger("kvframework")
    log.addHandler(_FAILED_COPIES)
    try:
        yield lambda: _FAILED_COPIES.shown
    finally:
        log.removeHandler(_FAILED_COPIES)


def must_succeed(future: Future[Any], what: str = "a transfer") -> None:
    """Fail unless the transfer ends well in time."""
    __tracebackhide__ = True
    outcome = _outcome(future, what)
    if not outcome:
        if problems := _FAILED_COPIES.problems():
            _FAILED_COPIES.shown = True
            pytest.fail(f"{what} failed ({_said(outcome)}): {promise_of(problems[0])}")
        why = f"; the server's log: {_FAILED_COPIES.line}" if _FAILED_COPIES.line else ""
        pytest.fail(f"{what} failed, though nothing hinders it: {_said(outcome)}{why}")


def must_work(engine: KitEngine, what: str = "", *, request: RequestHashes | None = None) -> None:
    """Store a request (None: a new one) and load it into other blocks; fail unless all memory is then as it must be."""
    __tracebackhide__ = True
    request = request or engine.request()
    must_succeed(engine.store(request, engine.source()), what or "a transfer")
    must_succeed(engine.load(request, engine.target()), what or "a transfer")
    engine.expect_loaded(engine.snapshot(), engine.source(), engine.target())
    engine.must_be_right(what or WRONG)


def must_miss(future: Future[Any], why: str = "a transfer that cannot succeed ended well") -> None:
    """Fail unless the transfer ends in time, as a miss."""
    __tracebackhide__ = True
    outcome = _outcome(future, "a transfer that is to miss")
    if outcome:
        pytest.fail(f"{why}: {_said(outcome)}")


def must_be_under_way(future: Future[Any], why: str, for_s: float = 0.2) -> None:
    """Fail if the transfer ends within `for_s` seconds."""
    __tracebackhide__ = True
    if future.wait(for_s):
        pytest.fail(f"{why}: the transfer ended while its copy stood still")


def _said(outcome: object) -> str:
    """Return an outcome in words."""
    if isinstance(outcome, LoadOutcome):
        return "a hit" if outcome.ok else f"a miss: {outcome.reason or 'without a reason'}"
    if isinstance(outcome, StoreOutcome):
        counts = {name: getattr(outcome, name) for name in ("stored", "present", "in_flight", "dropped", "unknown")}
        told = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no objects"
        return f"{told}{f' ({outcome.error})' if outcome.error else ''}"
    return repr(outcome)


def _outcome(future: Future[Any], what: str) -> Any:
    __tracebackhide__ = True
    try:
        return future.result(PATIENCE_S)
    except DeadlineExceeded:
        pytest.fail(f"{what} did not end within {PATIENCE_S:g} s")
    except Exception as error:  # noqa: BLE001  a transfer's future never fails
        pytest.fail(f"the future of {what} failed with {type(error).__name__}, instead of a miss: {error}")
