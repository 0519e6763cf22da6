"""Waiting for a condition with a deadline, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout: float = 20.0, what: str = "the condition") -> None:
    """Wait until `condition()` is true; fails the test after `timeout` seconds: enough for a busy machine, and fewer
    than the deadlines of a server, so that the end of a deadline does not pass for a prompt result."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout} s"
        time.sleep(0.005)
