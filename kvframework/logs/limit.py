"""The rate limit of log lines: a failure that repeats a thousand times a second must not fill a disk. Any process, any
thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

AT_ONCE = 5
EVERY_S = 10.0
_MAX_KINDS = 1024


class LogLimit(logging.Filter):
    """Lets `at_once` lines of a kind pass in `every_s` seconds, and adds the number of suppressed ones to the next
    line.

    A kind is a logger, a level and a text before its arguments are put in. Lines below WARNING all pass. Attach it to
    a handler, or to one logger.
    """

    def __init__(
        self, at_once: int = AT_ONCE, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._at_once = at_once
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        # By kind: the start of its time span, and the lines since then.
        self._spans: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = (record.name, record.levelno, str(record.msg))
        now = self._clock()
        with self._lock:
            began, lines = self._spans.get(kind, (now, 0))
            if now - began >= self._every_s:
                kept_back, began, lines = max(lines - self._at_once, 0), now, 0
            else:
                kept_back = 0
            if len(self._spans) >= _MAX_KINDS:
                self._spans.clear()
            self._spans[kind] = began, lines + 1
        if kept_back:
            record.msg = f"{record.getMessage()} ({kept_back} more such lines in between)"
            record.args = None
        return lines < self._at_once
