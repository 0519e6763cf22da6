"""The schedule of PINGs and the silence of a connection. Pure: the time is passed in."""

from __future__ import annotations

_SLOWEST_S = 2.0


class Heartbeat:
    """One PING is outstanding at a time; an unanswered one is repeated at growing intervals, so that none pile up."""

    def __init__(self, interval: float, timeout: float, now: float) -> None:
        self._interval = interval
        self._timeout = timeout
        self._next = now + interval
        self._repeat = timeout
        self._waiting_since: float | None = None

    def next_at(self) -> float:
        """Return the time at which `due` or `overdue` may next become true."""
        return self._next

    def due(self, now: float) -> bool:
        """Whether a PING is due."""
        return now >= self._next

    def overdue(self, now: float) -> bool:
        """Whether a PING has been unanswered for the timeout."""
        return self._waiting_since is not None and now >= self._waiting_since + self._timeout

    def silence(self, now: float) -> float:
        """Return the seconds for which the oldest PING has been unanswered."""
        return now - self._waiting_since if self._waiting_since is not None else 0.0

    def sent(self, now: float) -> None:
        """Record that a PING was sent, or could not be sent."""
        if self._waiting_since is None:
            self._waiting_since = now
            self._next = now + self._timeout
        else:
            self._repeat = min(self._repeat * 2, max(_SLOWEST_S, self._timeout))
            self._next = now + self._repeat

    def answered(self) -> None:
        """Record that some PING was answered."""
        if self._waiting_since is not None:
            self._next = self._waiting_since + self._interval
            self._waiting_since = None
            self._repeat = self._timeout

    def ask_now(self) -> None:
        """Make a PING due now, after another request was not answered, unless a PING is outstanding."""
        if self._waiting_since is None:
            self._next = 0.0
