"""The reason why a connection is down, for its user and the log. Written by the supervisor thread."""

from __future__ import annotations

import logging
import time

from kvframework.errors import KVFrameworkError, OutOfResources, ServerGone

logger = logging.getLogger(__name__)

TELL_AGAIN_S = 60.0


class WhyDown:
    """`error` is that of the last attempt, None after a successful one; `unanswered` is the error of the present
    attempt if its HELLO gets no answer."""

    def __init__(self, endpoint: str) -> None:
        self.error: Exception | None = None
        self.unanswered: ServerGone | None = None
        self._endpoint = endpoint
        self._tell_again_at = 0.0

    @property
    def most_telling(self) -> Exception | None:
        """The most specific reason: a refusal before silence, silence before a server that was not found."""
        if self.error is not None and not isinstance(self.error, ServerGone):
            return self.error
        return self.unanswered or self.error

    def note(self, error: Exception, *, quiet: bool) -> None:
        """Record the error of an attempt. Unless `quiet`, log it: loudly, unless there is just no server; again after a
        while, since a cache without hits is easily overlooked."""
        now = time.monotonic()
        if not quiet and (str(error) != str(self.error) or now >= self._tell_again_at):
            self._tell_again_at = now + TELL_AGAIN_S
            if isinstance(error, ServerGone):
                logger.info("no server at %s: %s", self._endpoint, error.fact)
            elif isinstance(error, OutOfResources):
                logger.warning("no connection to %s for now: %s", self._endpoint, error)
            elif isinstance(error, KVFrameworkError):
                logger.error("the server at %s cannot be used: %s", self._endpoint, error)
            else:
                logger.error("connecting to %s failed", self._endpoint, exc_info=error)
        self.error = error
        self.unanswered = None
