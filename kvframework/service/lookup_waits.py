"""The answers of lookups that their clients wait for, instead of asking again and again.

Held on the serving thread; storage threads only say which ticket has changed. A wait ends once the answer is what its
client waits for, at its time, or when the server stops.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from kvframework.api.futures import Promise
from kvframework.api.requests import Message
from kvframework.messaging.deadlines import Deadlines
from kvframework.storage.tickets import Answer

# Waits for one ticket: each is looked at whenever the ticket changes.
MOST_OF_TICKET = 16


class Wait(NamedTuple):
    """One client that waits for an answer about `ticket`, which is `enough`, until `until` of the clock. It does not
    know the ticket before the answer that `opens` it. `for_end`: only the end of the load is enough."""

    promise: Promise[Message]
    owner: int
    ticket: str
    until: float
    enough: Callable[[Answer], bool]
    opens: bool
    for_end: bool = False


class LookupWaits:
    """The waits by ticket. `wake`, which is called from any thread, makes the serving thread call `due` soon. With
    `closing`, set from any thread, the server stops, and every wait ends."""

    def __init__(self) -> None:
        self.closing = False
        self.wake: Callable[[], None] = lambda: None
        self._numbers = itertools.count()
        self._waits: dict[int, Wait] = {}
        self._of_ticket: dict[str, set[int]] = {}
        # The number of the waits of a ticket that look at each change.
        self._for_more: Counter[str] = Counter()
        self._times: Deadlines[int] = Deadlines()
        self._changed: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._waits)

    def has_room(self, ticket: str) -> bool:
        """Whether one more may wait for the ticket."""
        return len(self._of_ticket.get(ticket, ())) < MOST_OF_TICKET

    def add(self, wait: Wait) -> None:
        """Add a wait, while nothing can change its ticket."""
        number = next(self._numbers)
        self._waits[number] = wait
        self._of_ticket.setdefault(wait.ticket, set()).add(number)
        if not wait.for_end:
            self._for_more[wait.ticket] += 1
        self._times.set(number, wait.until)
        # Also if it is cancelled.
        wait.promise.add_done_callback(lambda _answered: self.changed(wait.ticket))

    def grown(self, ticket: str) -> None:
        """More of what a ticket waits for is there: no news to those who wait for the end. From any thread."""
        if ticket in self._for_more:
            self.changed(ticket)

    def changed(self, ticket: str) -> None:
        """A ticket's answer may be another now, or the ticket has ended. From any thread."""
        if ticket in self._of_ticket:
            self._changed.append(ticket)
            self.wake()

    def next_at(self) -> float:
        """Return the time of the next wait that is due, of the clock."""
        if self._changed or (self.closing and self._waits):
            return -math.inf
        return self._times.next() or math.inf

    def due(self, now: float) -> list[tuple[int, Wait]]:
        """Return the waits to look at, by number: their tickets have changed, or their time has come."""
        if self.closing:
            self._changed.clear()
            return list(self._waits.items())
        tickets = {self._changed.popleft() for _ in range(len(self._changed))}
        changed = {number for ticket in tickets for number in self._of_ticket.get(ticket, ())}
        return [(number, self._waits[number]) for number in sorted(changed.union(self._times.due(now)))]

    def end(self, number: int) -> None:
        """Remove a wait that was answered."""
        wait = self._waits.pop(number)
        self._times.discard(number)
        if not wait.for_end:
            self._for_more[wait.ticket] -= 1
            if not self._for_more[wait.ticket]:
                del self._for_more[wait.ticket]
        of_ticket = self._of_ticket[wait.ticket]
        of_ticket.discard(number)
        if not of_ticket:
            del self._of_ticket[wait.ticket]
