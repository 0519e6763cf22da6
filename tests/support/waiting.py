"""Waiting for a condition with a deadline, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout: float = 20.0, what: str = "the condition") -> None:
    """Returns once `condition()` is true; fails the test after `timeout` seconds: as many as a busy machine needs, and
    fewer than the deadlines of a server, so that what should come at once is not mistaken for what they end."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout} s"
        time.sleep(0.005)
