"""The pins and loads of a LOOKUP, under its ticket. Thread-safe: the storage lock guards the table.

Calls come from the serving thread and from plugins' threads and never wait for L2; a load ends in a storage thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvframework.api.requests import PackedKey, PrefetchTask
from kvframework.errors import LeaseUnknown, RequestError
from kvframework.storage.l1.leases import NO_PROMPT, PromptPart, StoredObject
from kvframework.storage.l1.objects import UNPIN_AT_ONCE
from kvframework.storage.lookup.ticket_table import Ticket, TicketTable
from kvframework.storage.manager import FindRow, StorageManager
from kvframework.storage.namespaces import NamespaceRecord, record_key


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
        self._lock = storage.lock
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
            return self.withdraw(owner)

    def withdraw(self, owner: int, request_id: str | None = None) -> int:
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
            lease = self._storage.pin(keys, owner=owner, request_id=request_id, lease_s=self._table.ticket_s)
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

            absent = self._storage.tiers_lacked(record_key(namespace))
            if not absent and self._may_load(ticket) and self._storage.submit_record_task(namespace, known):
                self._table.load_begun(ticket, None)
            return self._answer(ticket)

    def pinned(self, ticket_id: str, owner: int) -> list[StoredObject]:
        """Return the objects that a ticket pins, [] if it has ended. The list is the table's."""
        with self._lock, contextlib.suppress(LeaseUnknown):
            return self._storage.pinned(self._table.get(ticket_id, owner).pins, owner=owner) or []
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
        self._storage.looked_up(self._storage.row, wanted.prefix, wanted.digests, hit, wanted.chunk_tokens)
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
        return self._storage.has_tiers and self._table.may_load(ticket.owner)

    def _pin(self, ticket: Ticket, wanted: Wanted, *, use: bool = True) -> int:
        """Pin the present hit in L1, in place of the ticket's former pins; return its chunks. Once more while it grows
        is no `use`."""
        hit, objects = wanted.find(self._storage.row)
        lease_id = ""
        if hit:
            lease_id = self._storage.pin_objects(
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
            return len(self._storage.unpin(lease_id, owner=owner).objects) if lease_id else 0
        except LeaseUnknown:
            # It lapsed, and was forgotten to make room.
            return 0
