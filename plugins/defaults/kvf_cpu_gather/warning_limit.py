"""The rate limit of warnings: a server that is down must not fill the engine's log. Engine side."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable


class ThrottledLog:
    """Writes a warning per reason at most once in `interval_s` seconds, with the number left out since. Thread-safe."""

    def __init__(
        self, logger: logging.Logger, *, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, int]] = {}

    def warning(self, reason: str, message: str, *, error: BaseException | None = None) -> None:
        """Log `message`, with the traceback of `error`; warnings of an equal `reason` share one limit."""
        now = self._clock()
        with self._lock:
            written, left_out = self._last.get(reason, (float("-inf"), 0))
            if now - written < self._interval_s:
                self._last[reason] = (written, left_out + 1)
                return
            self._last[reason] = (now, 0)
        suffix = f" ({left_out} more since the last such line)" if left_out else ""
        self._logger.warning("%s%s", message, suffix, exc_info=error)
