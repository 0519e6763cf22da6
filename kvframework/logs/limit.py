"""How often something is said: a failure that repeats a thousand times a second must not fill a disk. Thread-safe."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable

AT_ONCE = 5
EVERY_S = 10.0
_MAX_KINDS = 1024


class LogLimit(logging.Filter):
    """Lets `at_once` lines of a kind pass in `every_s` seconds. Attached to a handler, or to one logger, it adds the
    number of suppressed ones to the next line; there a kind is a logger, a level and a text before its arguments are
    put in, and lines below WARNING all pass.

    For another kind ask `passes`. `LogLimit.once()` lets each kind pass once. The latest 1024 kinds are remembered."""

    def __init__(
        self, at_once: int = AT_ONCE, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._at_once = at_once
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._spans: dict[Hashable, tuple[float, int]] = {}

    @classmethod
    def once(cls) -> LogLimit:
        """Return one that lets each kind pass once, and again after `clear`."""
        return cls(1, math.inf)

    def passes(self, kind: Hashable) -> bool:
        """Whether a line of this kind may be written now, which is counted."""
        return self._count(kind)[0]

    def clear(self) -> None:
        """Forget all lines, such as after the end of the trouble."""
        with self._lock:
            self._spans.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        passes, suppressed = self._count((record.name, record.levelno, str(record.msg)))
        if suppressed:
            record.msg = f"{record.getMessage()} ({suppressed} similar lines left out)"
            record.args = None
        return passes

    def _count(self, kind: Hashable) -> tuple[bool, int]:
        """Count a line. Return whether it passes, and how many of its kind did not since the last one that did."""
        now = self._clock()
        with self._lock:
            began, lines = self._spans.pop(kind, (now, 0))
            suppressed = 0
            if now - began >= self._every_s:
                suppressed, began, lines = max(lines - self._at_once, 0), now, 0
            if len(self._spans) >= _MAX_KINDS:
                del self._spans[next(iter(self._spans))]
            self._spans[kind] = began, lines + 1
        return lines < self._at_once, suppressed
