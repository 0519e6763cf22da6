"""The silence of a server: whether it has left a request unanswered, since when, and the log lines about it.
Thread-safe, no I/O."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvframework.logs.limit import LogLimit

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

SILENCE_S = 1.0  # silence shorter than this is not logged


class Silence:
    """`changed` is called when `suspect` has changed, in the thread that changes it. Silence is not death: a link ends
    for other reasons."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.suspect = False
        self._changed = changed
        self._clock = time.monotonic
        # Guards `suspect`. Reentrant: a signal's handler may ask.
        self._lock = threading.RLock()
        self._suspect_since = 0.0
        self._unanswered_since = 0.0
        self._logged = False
        # When a message of the server arrived: the link sets it, at every message.
        self.heard_at = 0.0

    def seconds(self) -> float:
        """Return the seconds for which the server has answered nothing despite a request; 0 if it is not suspect."""
        if not self.suspect:
            return 0.0
        return max(self._clock() - max(self._unanswered_since, self.heard_at), 0.0)

    def begin(self, since: float | None = None) -> None:
        """Mark the server as suspect. `since` is the time of the first unanswered request; None: now."""
        with self._lock:
            if self.suspect:
                return
            self._unanswered_since = self._clock() if since is None else since
            self.suspect = True
        self._suspect_since = self._clock()
        self._changed()

    def end(self) -> None:
        """Record that the server's loop has answered a PING."""
        with self._lock:
            if not self.suspect:
                return
            self.suspect = False
        if self._logged:
            self._logged = False
            logger.info("the server answers again after %.1f s", self._clock() - self._suspect_since)
        else:
            logger.debug("one answer was late, the server answers")
        self._changed()

    def log(self, now: float) -> None:
        """Log a silence once it has lasted: a single late answer needs no action of an operator."""
        if self.suspect and not self._logged and now - self._suspect_since >= SILENCE_S:
            self._logged = True
            logger.warning("the server does not answer: every lookup is a miss until it does")
