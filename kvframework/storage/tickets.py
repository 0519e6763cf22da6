"""The pins and loads of a LOOKUP, under its ticket. Thread-safe: the storage lock guards the table.

Calls come from the serving thread and from plugins' threads and never wait for L2; a load ends in a storage thread.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvframework.api.requests import PackedKey, PrefetchTask
from kvframework.errors import LeaseUnknown, RequestError
from kvframework.storage.l1.entries import StoredObject
from kvframework.storage.l1.eviction_statistics import FindRow
from kvframework.storage.l1.leases import NO_PROMPT, PromptPart
from kvframework.storage.l1.objects import UNPIN_AT_ONCE
from kvframework.storage.manager import StorageManager
from kvframework.storage.namespaces import NamespaceRecord, record_key

# The table of tickets: the pins of each LOOKUP, its deadline, and whether a load for it is in flight.
#
# A pure state machine beside the leases: no I/O, no clock of its own (`now` is passed in, in seconds of any monotonic
# clock), no lock (its caller serialises). A ticket's pins are one pin lease of the object table: a call that takes them
# from a ticket returns the lease's id, and the caller unpins. Invariants, tested against a model:
#
# * A ticket belongs to one client session. Request ids may collide; tickets do not.
# * During a load the ticket ends only with its owner; its lifetime starts again at the end of the load.
# * A ticket that has ended never pins again, although its load may still be in flight and counts until it has ended.
# * A client session that has ended gets no ticket from a plugin's handler, which may run in another thread.

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


class Wanted(NamedTuple):
    """The objects that a LOOKUP requests. `find` gives the chunks of the hit and its objects, by rows of L1; `load`
    starts the load of the rest and receives a callback for its end; None if it was refused. `prefix` and `digests` name
    the objects of one row, which stands for all in the counts. The second callback of `load` is called, in a storage
    thread, once the tiers have said what they have, when objects have arrived, and at the end. `prompt` tells where in
    the prompt the objects of a hit of so many chunks are."""

    prefix: bytes
    digests: Sequence[bytes]
    chunk_tokens: int
    find: Callable[[FindRow], tuple[int, list[StoredObject]]]
    load: Callable[[Callable[[], None], Callable[[], None]], PrefetchTask | None]
    prompt: Callable[[int], PromptPart] = lambda _hit: NO_PROMPT


class Answer(NamedTuple):
    """The present state of a ticket. `ticket` is its id, "" for a ticket without pins and without a load. `decided`:
    nothing but the load of what the tiers have is waited for."""

    hit_tokens: int
    ticket: str
    pending: bool
    decided: bool = True


class LookupTickets:
    """Tickets belong to the client session that requested them. `on_end` is called with the id of each ticket that
    ends, in the thread of the call that ends it, under the storage lock; `on_growth` with that of a ticket whose load
    has brought more or is decided, and `on_change` once it is over, in a storage thread."""

    def __init__(
        self,
        storage: StorageManager,
        *,
        ticket_s: float,
        on_end: Callable[[str], object] = lambda _ticket: None,
        on_change: Callable[[str], object] = lambda _ticket: None,
        on_growth: Callable[[str], object] = lambda _ticket: None,
    ) -> None:
        self._storage = storage
        self._on_end = on_end
        self._on_change = on_change
        self._on_growth = on_growth
        # The tickets for which objects have arrived since the last answer.
        self._grown: dict[str, Wanted] = {}
        self._lock = storage.table.lock
        self._clock = storage.clock
        self._table = TicketTable(ticket_s)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def ticket_s(self) -> float:
        """The lifetime of a ticket that is not freed, in seconds."""
        return self._table.ticket_s

    def configure(self, *, ticket_s: float) -> None:
        """Change the lifetime of tickets from their next pin on."""
        with self._lock:
            self._table.ticket_s = ticket_s

    def begin_owner(self, owner: int) -> None:
        """Add a client session, which has begun or has opened another connection."""
        with self._lock:
            self._table.begin_owner(owner)

    def end_owner(self, owner: int) -> int:
        """End the tickets of a client session that has ended, which gets no new ones; return their number."""
        with self._lock:
            self._table.end_owner(owner)
            return self.cancel(owner)

    def cancel(self, owner: int, request_id: str | None = None) -> int:
        """End a client's tickets (those of one request); return their number."""
        with self._lock:
            ending = self._table.of(owner, request_id)
            for ticket in ending:
                self._end(ticket)
            return len(ending)

    def expire(self) -> None:
        """End tickets whose time has passed, so that a client that forgets them leaves nothing behind; those beyond
        `UNPIN_AT_ONCE` unpinned objects end at the next tick."""
        unpinned = 0
        with self._lock:
            for ticket in self._table.due(self._clock()):
                # Its pins lapse as they end, so their number is no longer available.
                unpinned += ticket.objects
                self._end(ticket)
                if unpinned >= UNPIN_AT_ONCE:
                    break

    def pin(self, owner: int, keys: Sequence[PackedKey], request_id: str) -> str:
        """Pin all `keys` under a ticket and return its id; "" if one of them is missing or the session has ended."""
        with self._lock:
            if not keys or not self._table.is_owner(owner):
                return ""
            lease = self._storage.table.pin(keys, owner=owner, request_id=request_id, lease_s=self._table.ticket_s)
            if lease is None:
                return ""
            now = self._clock()
            ticket = self._table.open(owner, request_id, now)
            self._table.pin(ticket, lease.id, objects=len(keys), hit_tokens=0, now=now)
            self._table.keep(ticket)
            return ticket.id

    def look_up(self, owner: int, request_id: str, wanted: Wanted) -> Answer:
        """Pin the objects in L1 and load the rest from L2. Raises `RequestError` if the owner holds too many pins."""
        with self._lock:
            ticket = self._table.open(owner, request_id, self._clock())
            self._ask(ticket, wanted)
            return self._answer(ticket)

    def look_up_record(
        self, owner: int, request_id: str, namespace: bytes, wanted: Callable[[NamespaceRecord], Wanted]
    ) -> Answer:
        """Look up like `look_up` in a namespace that is not known here: its record is first read from L2. `wanted` is
        called in a storage thread, and its exceptions are logged."""
        with self._lock:
            ticket = self._table.open(owner, request_id, self._clock())

            def known() -> None:
                with self._lock:
                    self._table.load_ended(ticket, self._clock())
                    record = None if ticket.ended else self._storage.records.get(namespace)
                    if record is not None:
                        self._ask(ticket, wanted(record))
                self._on_change(ticket.id)

            absent = self._storage.tiers.lacked(record_key(namespace))
            if not absent and self._may_load(ticket) and self._storage.tiers.submit_record_task(namespace, known):
                self._table.load_begun(ticket, None)
            return self._answer(ticket)

    def pinned(self, ticket_id: str, owner: int) -> list[StoredObject]:
        """Return the objects that a ticket pins, [] if it has ended. The list is the table's."""
        with self._lock, contextlib.suppress(LeaseUnknown):
            return self._storage.table.pinned(self._table.get(ticket_id, owner).pins, owner=owner) or []
        return []

    def is_loading(self, ticket_id: str, owner: int) -> bool:
        """Whether a ticket's load is under way; False for a ticket that has ended. Does not pin what has arrived."""
        with self._lock, contextlib.suppress(LeaseUnknown):
            return self._table.get(ticket_id, owner).pending
        return False

    def ask_again(self, ticket_id: str, owner: int) -> Answer:
        """Return the state of a ticket. Raises `LeaseUnknown`."""
        with self._lock:
            ticket = self._table.get(ticket_id, owner)
            wanted = self._grown.pop(ticket_id, None)
            if wanted is not None:
                with contextlib.suppress(RequestError):  # too many pins: the answer stays as it was
                    self._pin(ticket, wanted, use=False)
            return self._answer(ticket)

    def free(self, ticket_id: str, owner: int) -> int:
        """End a ticket; return the number of objects it had pinned. Raises `LeaseUnknown`."""
        with self._lock:
            return self._end(self._table.get(ticket_id, owner))

    def _ask(self, ticket: Ticket, wanted: Wanted) -> None:
        hit = self._pin(ticket, wanted)
        self._storage.table.looked_up(self._storage.table.row, wanted.prefix, wanted.digests, hit, wanted.chunk_tokens)
        if hit < len(wanted.digests) and self._may_load(ticket):
            task = wanted.load(lambda: self._loaded(ticket, wanted), lambda: self._changed(ticket, wanted))
            if task is not None:
                self._table.load_begun(ticket, task.cancel)

    def _loaded(self, ticket: Ticket, wanted: Wanted) -> None:
        """Continue a lookup after its load has ended (in a storage thread), while the load still pins its objects."""
        with self._lock:
            self._table.load_ended(ticket, self._clock())
            self._grown.pop(ticket.id, None)
            if not ticket.ended:
                self._pin(ticket, wanted)

    def _changed(self, ticket: Ticket, wanted: Wanted) -> None:
        """Note that the tiers have said what they have, that objects have arrived, or that the load has ended and pins
        nothing any more (in a storage thread)."""
        with self._lock:
            loads = ticket.pending and not ticket.ended
            if loads:
                self._table.load_decided(ticket)
                self._grown[ticket.id] = wanted
        (self._on_growth if loads else self._on_change)(ticket.id)

    def _may_load(self, ticket: Ticket) -> bool:
        """Whether the ticket may load from L2; else it is answered from L1."""
        return bool(self._storage.tiers.stores) and self._table.may_load(ticket.owner)

    def _pin(self, ticket: Ticket, wanted: Wanted, *, use: bool = True) -> int:
        """Pin the present hit in L1, in place of the ticket's former pins; return its chunks. Once more while it grows
        is no `use`."""
        hit, objects = wanted.find(self._storage.table.row)
        lease_id = ""
        if hit:
            lease_id = self._storage.table.pin_objects(
                objects,
                owner=ticket.owner,
                request_id=ticket.request_id,
                lease_s=self._table.ticket_s,
                use="lookup" if use else None,
                prompt=wanted.prompt(hit),
                hit=True,
            ).id
        tokens = hit * wanted.chunk_tokens
        before = self._table.pin(ticket, lease_id, objects=len(objects), hit_tokens=tokens, now=self._clock())
        self._unpin(ticket.owner, before)
        return hit

    def _answer(self, ticket: Ticket) -> Answer:
        self._table.keep(ticket)
        if not ticket.pending and not ticket.pins:
            return Answer(0, "", False)
        return Answer(ticket.hit_tokens, ticket.id, ticket.pending, ticket.decided)

    def _end(self, ticket: Ticket) -> int:
        self._grown.pop(ticket.id, None)
        self._on_end(ticket.id)
        return self._unpin(ticket.owner, self._table.end(ticket))

    def _unpin(self, owner: int, lease_id: str) -> int:
        try:
            return len(self._storage.table.unpin(lease_id, owner=owner).objects) if lease_id else 0
        except LeaseUnknown:
            # It lapsed, and was forgotten to make room.
            return 0
