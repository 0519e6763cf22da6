"""What keeps a connection from coming up, as its user and the log see it. Written by the supervisor thread."""

from __future__ import annotations

import logging
import time

from kvframework.errors import KVFrameworkError, OutOfResources, ServerGone

logger = logging.getLogger(__name__)

TELL_AGAIN_S = 60.0


class WhyDown:
    """`error` is of the last attempt, None after one that worked; `unanswered` is what the attempt under way fails with
    if no answer to its HELLO comes."""

    def __init__(self, endpoint: str) -> None:
        self.error: Exception | None = None
        self.unanswered: ServerGone | None = None
        self._endpoint = endpoint
        self._tell_again_at = 0.0

    @property
    def most_telling(self) -> Exception | None:
        """A refusal before silence, silence before that nobody was there."""
        if self.error is not None and not isinstance(self.error, ServerGone):
            return self.error
        return self.unanswered or self.error

    def note(self, error: Exception, *, quiet: bool) -> None:
        """An attempt has failed. Unless `quiet`, logs it: loudly, unless it is only that nobody serves; again after a
        while, since a cache that is never hit looks like any other."""
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
