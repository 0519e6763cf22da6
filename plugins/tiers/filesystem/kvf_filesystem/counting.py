"""The thread that counts the bytes in the folder: at the start, on request, and at intervals if other servers change
it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvframework.errors import TierError

_log = logging.getLogger(__name__)

RETRY_S = 5.0


class Counting:
    """Calls `count` until it succeeds, then after each `again` and every `every_s` seconds (None: never), until
    `close`.

    `count` may raise `OSError`. Thread-safe.
    """

    def __init__(self, count: Callable[[], None], *, every_s: float | None, where: str) -> None:
        self._count = count
        self._every_s = every_s
        self._where = where
        self._changed = threading.Condition()
        self._counted = False
        self._wanted = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvf-filesystem", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Blocks until the first count is complete, for at most `seconds` and not beyond `close`; True if it is
        complete."""
        with self._changed:
            self._changed.wait_for(lambda: self._counted or self._closed, seconds)
            return self._counted

    def again(self) -> None:
        """Requests another count. Does not wait for it."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Ends the thread; waits at most `seconds` for its current step. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        logged = ""
        while not self._closed:
            pause, self._wanted = self._every_s, False
            try:
                self._count()
            except OSError as error:
                pause = RETRY_S
                fact = error.fact if isinstance(error, TierError) else error.strerror or type(error).__name__
                if fact != logged and not self._closed:
                    _log.warning("%s: the bytes in the folder cannot be counted: %s", self._where, fact)
                logged = fact
            else:
                logged = ""
                with self._changed:
                    self._counted = True
                    self._changed.notify_all()
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed, pause)
