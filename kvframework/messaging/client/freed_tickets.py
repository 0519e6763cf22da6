"""The tickets that a client has done with, until a request takes them to the server. Thread-safe.

A LOOKUP carries them, or the next PING, and no caller waits. A PING is sent for them alone only ahead of a request that
needs their room. At the link's end they are forgotten, since its session's tickets end with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvframework.wire.messages import MAX_FREED


class FreedTickets:
    """The tickets, oldest first."""

    def __init__(self) -> None:
        self._tickets: deque[str] = deque()

    def begin(self) -> None:
        """Start a new session, which has no tickets."""
        self._tickets.clear()

    def add(self, tickets: Iterable[str]) -> None:
        """Add tickets; more than once does no harm."""
        self._tickets.extend(tickets)

    def take(self) -> tuple[str, ...]:
        """Remove and return the next ones, `MAX_FREED` at most. Who cannot send them gives them back by `add`."""
        taken: list[str] = []
        while self._tickets and len(taken) < MAX_FREED:
            try:
                taken.append(self._tickets.popleft())
            except IndexError:  # another thread took it
                break
        return tuple(taken)
