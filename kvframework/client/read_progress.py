"""Progress of a long read in the log: at its beginning, every ten seconds, and with its rate at the end."""

from __future__ import annotations

import logging
import threading
import time

_EVERY_S = 10.0
# A smaller read ends before a user wonders.
_WORTH_TELLING = 256 << 20


class Progress:
    """A counter of bytes out of `total`, for any thread. Never blocks but for the log."""

    def __init__(self, log: logging.Logger, what: str, total: int) -> None:
        self._log = log
        self._what = what
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        self._started = self._told = time.monotonic()
        self._told_at_all = total >= _WORTH_TELLING
        if self._told_at_all:
            log.info("%s, %.1f GB", what, total / 1e9)

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            due = self._told_at_all and now - self._told >= _EVERY_S
            if due:
                self._told = now
        if due:
            self._log.info("%s: %.1f of %.1f GB", self._what, self._done / 1e9, self._total / 1e9)

    def end(self) -> None:
        if self._told_at_all:
            seconds = max(time.monotonic() - self._started, 1e-9)
            self._log.info("%s: done in %.1f s, %.2f GB/s", self._what, seconds, self._done / 1e9 / seconds)
