"""The limit of one call: its deadline, or the tier's `close`. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvframework.errors import TierError


class Limit:
    """The limit of one call; checked between its steps, and by SQLite in the middle of one."""

    def __init__(self, deadline: float, closed: Callable[[], bool]) -> None:
        self._deadline = deadline
        self._closed = closed

    def passed(self) -> bool:
        return self._closed() or time.monotonic() >= self._deadline

    def remaining(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(self._deadline - time.monotonic(), 0.0)

    def check(self) -> None:
        """Raises `TierError` if the call must end."""
        if self._closed():
            raise TierError("the tier is closed")
        if time.monotonic() >= self._deadline:
            raise TierError("the call's deadline has passed")
