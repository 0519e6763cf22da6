"""The ends of transfers, as the transport kit's tests expect them: with a sentence for any other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvframework.api.futures import Future
from kvframework.client import RequestHashes
from kvframework.errors import DeadlineExceeded
from kvframework.testing.transport.engine import WRONG, KitEngine
from kvframework.testing.transport.node import PATIENCE_S


class _FailedCopies(logging.Handler):
    """The last line in which a server of this process says why a copy failed."""

    line = ""

    def emit(self, record: logging.LogRecord) -> None:
        if ": a copy failed: " in (line := record.getMessage()):
            self.line = line


_FAILED_COPIES = _FailedCopies(logging.WARNING)


@contextmanager
def failed_copies_noted() -> Iterator[None]:
    """Have `must_succeed` show why a copy failed that failed meanwhile: an outcome does not carry it."""
    _FAILED_COPIES.line = ""
    log = logging.getLogger("kvframework")
    log.addHandler(_FAILED_COPIES)
    try:
        yield
    finally:
        log.removeHandler(_FAILED_COPIES)


def must_succeed(future: Future[Any], what: str = "a transfer") -> None:
    """Fail unless the transfer ends well in time."""
    __tracebackhide__ = True
    outcome = _outcome(future, what)
    if not outcome:
        why = f"; the server's log: {_FAILED_COPIES.line}" if _FAILED_COPIES.line else ""
        pytest.fail(f"{what} failed: {outcome}{why}")


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
        pytest.fail(f"{why}: {outcome}")


def must_be_under_way(future: Future[Any], why: str, for_s: float = 0.2) -> None:
    """Fail if the transfer ends within `for_s` seconds."""
    __tracebackhide__ = True
    if future.wait(for_s):
        pytest.fail(f"{why}: the transfer ended while its copy stood still")


def _outcome(future: Future[Any], what: str) -> Any:
    __tracebackhide__ = True
    try:
        return future.result(PATIENCE_S)
    except DeadlineExceeded:
        pytest.fail(f"{what} did not end within {PATIENCE_S:g} s")
    except Exception as error:  # noqa: BLE001  a transfer's future never fails
        pytest.fail(f"the future of {what} failed with {type(error).__name__}, instead of a miss: {error}")
