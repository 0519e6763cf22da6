"""The table of tickets: the pins of each LOOKUP, its deadline, and whether a load for it is in flight.

A pure state machine beside the leases: no I/O, no clock of its own (`now` is passed in, in seconds of any monotonic
clock), no lock (its caller serialises). A ticket's pins are one pin lease of the object table: a call that takes them
from a ticket returns the lease's id, and the caller unpins. Invariants, tested against a model:

* A ticket belongs to one client session. Request ids may collide; tickets do not.
* During a load the ticket ends only with its owner; its lifetime starts again at the end of the load.
* A ticket that has ended never pins again, although its load may still be in flight and counts until it has ended.
* A client session that has ended gets no ticket from a plugin's handler, which may run in another thread.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvframework.errors import LeaseUnknown

# Concurrent loads of one client; for the bound of all clients see `kvframework.storage.l2.prefetch`.
MAX_LOADS = 128


@dataclass(slots=True, eq=False)
class Ticket:
    """The ticket of one LOOKUP, or of a plugin handler's pins. `pins` is the id of its pin lease of `objects` objects,
    "" for none. `decided`: the tiers have said what they have, or no load was begun."""

    id: str
    owner: int
    request_id: str
    deadline: float
    hit_tokens: int = 0
    pins: str = ""
    objects: int = 0
    pending: bool = False
    decided: bool = True
    cancel_load: Callable[[], object] | None = None
    ended: bool = False


class TicketTable:
    """All tickets, by id. `ticket_s` is a ticket's lifetime after its last pin or the end of its load, in seconds."""

    def __init__(self, ticket_s: float) -> None:
        self.ticket_s = ticket_s
        self._tickets: dict[str, Ticket] = {}
        # The client sessions that have begun and not ended.
        self._owners: set[int] = set()
        self._loading: Counter[int] = Counter()
        # Ids are unique across restarts, like those of leases.
        self._boot = secrets.token_hex(4)
        self._count = itertools.count(1)

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets.values())

    def begin_owner(self, owner: int) -> None:
        """Add a client session, which has begun or has opened another connection."""
        self._owners.add(owner)

    def end_owner(self, owner: int) -> None:
        """Remove a client session that has ended; its tickets end by `end`."""
        self._owners.discard(owner)

    def is_owner(self, owner: int) -> bool:
        """Whether the client session has begun and not ended."""
        return owner in self._owners

    def open(self, owner: int, request_id: str, now: float) -> Ticket:
        """Return a new ticket, which is not in the table until `keep`."""
        return Ticket(f"{self._boot}.{next(self._count):x}", owner, request_id, now + self.ticket_s)

    def keep(self, ticket: Ticket) -> None:
        """Add a ticket to the table; a ticket without pins and without a load is removed."""
        if ticket.pending or ticket.pins:
            self._tickets[ticket.id] = ticket
        else:
            self._tickets.pop(ticket.id, None)

    def get(self, ticket_id: str, owner: int) -> Ticket:
        """Return the ticket. Raises `LeaseUnknown` unless it exists and is this owner's."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.owner != owner:
            raise LeaseUnknown(f"there is no ticket {ticket_id!r} of this client", hint="look up again")
        return ticket

    def of(self, owner: int, request_id: str | None = None) -> list[Ticket]:
        """Return the tickets of an owner, or those of one request."""
        return [
            ticket
            for ticket in self._tickets.values()
            if ticket.owner == owner and (request_id is None or ticket.request_id == request_id)
        ]

    def due(self, now: float) -> list[Ticket]:
        """Return the tickets whose time has passed, the oldest first."""
        return [ticket for ticket in self._tickets.values() if not ticket.pending and now >= ticket.deadline]

    def pin(self, ticket: Ticket, lease_id: str, *, objects: int, hit_tokens: int, now: float) -> str:
        """Replace the ticket's pin lease ("" for none); return the former one, "" for none."""
        before, ticket.pins = ticket.pins, lease_id
        ticket.objects = objects
        ticket.hit_tokens = hit_tokens
        ticket.deadline = now + self.ticket_s
        return before

    def end(self, ticket: Ticket) -> str:
        """End a ticket and cancel its load; return its pin lease, "" for none."""
        ticket.ended = True
        self._tickets.pop(ticket.id, None)
        if ticket.cancel_load is not None:
            ticket.cancel_load()
        lease_id, ticket.pins = ticket.pins, ""
        return lease_id

    def may_load(self, owner: int) -> bool:
        """Whether the owner has fewer than `MAX_LOADS` loads in flight: one client must not keep others from L2."""
        return self._loading[owner] < MAX_LOADS

    def load_begun(self, ticket: Ticket, cancel: Callable[[], object] | None) -> None:
        """Record the start of a load for the ticket; `cancel` ends it early, None if it cannot be cancelled."""
        ticket.pending = True
        ticket.decided = False
        ticket.cancel_load = cancel
        self._loading[ticket.owner] += 1

    def load_decided(self, ticket: Ticket) -> None:
        """Record that the tiers have said what they have, while the load goes on."""
        ticket.decided = True

    def load_ended(self, ticket: Ticket, now: float) -> None:
        """Record the end of the load, successful or not. Called once for each `load_begun`."""
        ticket.pending = False
        ticket.decided = True
        ticket.cancel_load = None
        ticket.deadline = now + self.ticket_s
        self._loading[ticket.owner] -= 1
        if not self._loading[ticket.owner]:
            del self._loading[ticket.owner]

    def loads(self, owner: int) -> int:
        """Return the number of the owner's loads in flight, including those of tickets that have ended."""
        return self._loading[owner]
