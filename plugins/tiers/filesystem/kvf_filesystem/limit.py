"""The limit of one call: its deadline, or the tier's `close`. Pure but for the clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvframework.errors import TierError

CLOSED = "the tier is closed"
_TOO_LATE = "the deadline has passed"


class Limit:
    """The limit of one call; checked between files and between slices of a large one."""

    def __init__(self, deadline: float, closed: Callable[[], bool]) -> None:
        self._deadline = deadline
        self._closed = closed

    def check(self) -> None:
        """Raises `TierError` if the call must end."""
        if self._closed():
            raise TierError(CLOSED)
        if time.monotonic() >= self._deadline:
            raise TierError(_TOO_LATE)

    def remaining(self) -> float:
        """Seconds until the deadline, at least 0, at most the longest timeout of a lock."""
        return min(max(self._deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)

    @contextmanager
    def holding(self, lock: threading.Lock) -> Iterator[None]:
        """Holds `lock` in the block. Raises `TierError` if it is not free before the deadline."""
        if not lock.acquire(timeout=self.remaining()):
            raise TierError(_TOO_LATE)
        try:
            yield
        finally:
            lock.release()
