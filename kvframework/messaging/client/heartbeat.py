"""Owns when a connection sends PING and when its silence counts. Pure: the time is given."""

from __future__ import annotations

_SLOWEST_S = 2.0


class Heartbeat:
    """One PING is outstanding at a time; an unanswered one is sent again, ever more slowly, so that none pile up."""

    def __init__(self, interval: float, timeout: float, now: float) -> None:
        self._interval = interval
        self._timeout = timeout
        self._next = now + interval
        self._repeat = timeout
        self._waiting_since: float | None = None

    def next_at(self) -> float:
        """When `due` or `overdue` may next become true."""
        return self._next

    def due(self, now: float) -> bool:
        """True if a PING is to be sent."""
        return now >= self._next

    def overdue(self, now: float) -> bool:
        """True if a PING has been unanswered for the timeout."""
        return self._waiting_since is not None and now >= self._waiting_since + self._timeout

    def silence(self, now: float) -> float:
        """Seconds for which the oldest PING has been unanswered."""
        return now - self._waiting_since if self._waiting_since is not None else 0.0

    def sent(self, now: float) -> None:
        """A PING was sent, or could not be."""
        if self._waiting_since is None:
            self._waiting_since = now
            self._next = now + self._timeout
        else:
            self._repeat = min(self._repeat * 2, max(_SLOWEST_S, self._timeout))
            self._next = now + self._repeat

    def answered(self) -> None:
        """Some PING was answered."""
        if self._waiting_since is not None:
            self._next = self._waiting_since + self._interval
            self._waiting_since = None
            self._repeat = self._timeout

    def ask_now(self) -> None:
        """Something else was not answered: find out at once, unless a PING is under way anyhow."""
        if self._waiting_since is None:
            self._next = 0.0
