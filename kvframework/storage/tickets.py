"""The pins and loads of a LOOKUP, under its ticket. Thread-safe: the storage lock guards the tickets.

Calls come from the serving thread and from plugins' threads and never wait for L2; a load ends in a storage thread.
Invariants, tested against a model:

* A ticket belongs to one client session. Request ids may collide; tickets do not.
* During a load the ticket ends only with its owner; its lifetime starts again at the end of the load.
* A ticket that has ended never pins again, although its load may still be in flight and counts until it has ended.
* A client session that has ended gets no ticket from a plugin's handler, which may run in another thread.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
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

# Concurrent loads of one client; for the bound of all clients see `kvframework.storage.l2.prefetch`.
MAX_LOADS = 128


class Wanted(NamedTuple):
    """The objects that a LOOKUP requests. `find` gives the chunks of the hit and its objects, by rows of L1; `load`
    starts the load of the rest and receives a callback for its end; None if it was refused. `prefix` and `digests` name
    the objects of one row, which stands for all in the counts. The second callback of `load` is called, in a storage
    thread, once the tiers have said what they have, when objects have arrived, and at the end. `prompt` tells where in
    the prompt the objects of a hit of so many chunks are. One `ahead` of its request is a use only with a hint."""

    prefix: bytes
    digests: Sequence[bytes]
    chunk_tokens: int
    find: Callable[[FindRow], tuple[int, list[StoredObject]]]
    load: Callable[[Callable[[], None], Callable[[], None]], PrefetchTask | None]
    prompt: Callable[[int], PromptPart] = lambda _hit: NO_PROMPT
    ahead: bool = False


class Answer(NamedTuple):
    """The present state of a ticket. `ticket` is its id, "" for a ticket without pins and without a load. `decided`:
    nothing but the load of what the tiers have is waited for."""

    hit_tokens: int
    ticket: str
    pending: bool
    decided: bool = True


@dataclass(slots=True, eq=False)
class Ticket:
    """The ticket of one LOOKUP, or of a plugin handler's pins. `pins` is the id of its pin lease of `objects` objects,
    "" for none; `pending` while a load is in flight. `decided`: the tiers have said what they have, or no load was
    begun. `grown`: what is wanted, if some of it has arrived since the last answer."""

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
    grown: Wanted | None = None
    ended: bool = False


@dataclass(eq=False)
class LookupTickets:
    """`ticket_s` is a ticket's lifetime after its last pin or the end of its load, in seconds; it may be changed.
    `on_end` is called with the id of each ticket that ends, in the thread of the call that ends it, under the storage
    lock; `on_growth` with that of a ticket whose load has brought more or is decided, in a storage thread, and
    `on_change` once it is over, also in a thread that asks again, under that lock."""

    storage: StorageManager
    ticket_s: float
    on_end: Callable[[str], object] = lambda _ticket: None
    on_change: Callable[[str], object] = lambda _ticket: None
    on_growth: Callable[[str], object] = lambda _ticket: None

    def __post_init__(self) -> None:
        self._lock = self.storage.table.lock
        self._clock = self.storage.clock
        self._tickets: dict[str, Ticket] = {}
        # The client sessions that have begun and not ended.
        self._owners: set[int] = set()
        # Loads in progress by owner, also of tickets that have ended.
        self._loading: Counter[int] = Counter()
        # Ids are unique across restarts, like those of leases.
        self._boot = secrets.token_hex(4)
        self._count = itertools.count(1)

    def __len__(self) -> int:
        return len(self._tickets)

    def begin_owner(self, owner: int) -> None:
        """Add a client session, which has begun or has opened another connection."""
        with self._lock:
            self._owners.add(owner)

    def end_owner(self, owner: int) -> int:
        """End the tickets of a client session that has ended, which gets no new ones; return their number."""
        with self._lock:
            self._owners.discard(owner)
            return self.cancel(owner)

    def cancel(self, owner: int, request_id: str | None = None) -> int:
        """End a client's tickets (those of one request); return their number."""
        with self._lock:
            ending = [
                ticket
                for ticket in self._tickets.values()
                if ticket.owner == owner and request_id in (None, ticket.request_id)
            ]
            for ticket in ending:
                self._end(ticket)
            return len(ending)

    def expire(self) -> None:
        """End tickets whose time has passed, so that a client that forgets them leaves nothing behind; those beyond
        `UNPIN_AT_ONCE` unpinned objects end at the next tick."""
        unpinned, now = 0, self._clock()
        with self._lock:
            due = [ticket for ticket in self._tickets.values() if not ticket.pending and now >= ticket.deadline]
            for ticket in due:
                # Its pins lapse as they end, so their number is no longer available.
                unpinned += ticket.objects
                self._end(ticket)
                if unpinned >= UNPIN_AT_ONCE:
                    break

    def pin(self, owner: int, keys: Sequence[PackedKey], request_id: str) -> str:
        """Pin all `keys` under a ticket and return its id; "" if one of them is missing or the session has ended."""
        with self._lock:
            if not keys or owner not in self._owners:
                return ""
            lease = self.storage.table.pin(keys, owner=owner, request_id=request_id, lease_s=self.ticket_s)
            if lease is None:
                return ""
            ticket = self._open(owner, request_id)
            ticket.pins, ticket.objects = lease.id, len(keys)
            return self._answer(ticket).ticket

    def look_up(self, owner: int, request_id: str, wanted: Wanted) -> Answer:
        """Pin the objects in L1 and load the rest from L2. Raises `RequestError` if the owner holds too many pins."""
        with self._lock:
            ticket = self._open(owner, request_id)
            self._ask(ticket, wanted)
            return self._answer(ticket)

    def look_up_record(
        self, owner: int, request_id: str, namespace: bytes, wanted: Callable[[NamespaceRecord], Wanted]
    ) -> Answer:
        """Look up like `look_up` in a namespace that is not known here: its record is first read from L2. `wanted` is
        called in a storage thread, and its exceptions are logged."""
        with self._lock:
            ticket, tiers = self._open(owner, request_id), self.storage.tiers

            def known() -> None:
                with self._lock:
                    self._load_ended(ticket)
                    record = None if ticket.ended else self.storage.records.get(namespace)
                    if record is not None:
                        self._ask(ticket, wanted(record))
                self.on_change(ticket.id)

            absent = tiers.lacked(record_key(namespace))
            if not absent and self._may_load(owner) and tiers.submit_record_task(namespace, known):
                self._load_begun(ticket, None)
            return self._answer(ticket)

    def pinned(self, ticket_id: str, owner: int) -> list[StoredObject]:
        """Return the objects that a ticket pins, [] if it has ended. The list is the table's."""
        with self._lock, contextlib.suppress(LeaseUnknown):
            return self.storage.table.pinned(self._get(ticket_id, owner).pins, owner=owner)
        return []

    def is_loading(self, ticket_id: str, owner: int) -> bool:
        """Whether a ticket's load is under way; False for a ticket that has ended. Does not pin what has arrived."""
        with self._lock, contextlib.suppress(LeaseUnknown):
            return self._get(ticket_id, owner).pending
        return False

    def ask_again(self, ticket_id: str, owner: int) -> Answer:
        """Return the state of a ticket. Raises `LeaseUnknown`."""
        with self._lock:
            ticket = self._get(ticket_id, owner)
            wanted, ticket.grown = ticket.grown, None
            if wanted is not None:
                with contextlib.suppress(RequestError):  # too many pins: the answer stays as it was
                    self._pin(ticket, wanted, use=False)
            return self._answer(ticket)

    def free(self, ticket_id: str, owner: int) -> int:
        """End a ticket; return the number of objects it had pinned. Raises `LeaseUnknown`."""
        with self._lock:
            return self._end(self._get(ticket_id, owner))

    def _open(self, owner: int, request_id: str) -> Ticket:
        """Return a new ticket, which is in the table from its first `_answer` on."""
        ticket_id = f"{self._boot}.{next(self._count):x}"
        return Ticket(ticket_id, owner, request_id, self._clock() + self.ticket_s)

    def _get(self, ticket_id: str, owner: int) -> Ticket:
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.owner != owner:
            raise LeaseUnknown(f"unknown ticket {ticket_id!r} of this client", hint="look up again")
        return ticket

    def _answer(self, ticket: Ticket) -> Answer:
        """Return the state of a ticket; one without pins and without a load leaves the table."""
        if not ticket.pending and not ticket.pins:
            if self._tickets.pop(ticket.id, None) is not None:
                self.on_change(ticket.id)  # for others that wait for it: the load's last step may be to come
            return Answer(0, "", False)
        self._tickets[ticket.id] = ticket
        return Answer(ticket.hit_tokens, ticket.id, ticket.pending, ticket.decided)

    def _ask(self, ticket: Ticket, wanted: Wanted) -> None:
        table = self.storage.table
        hit = self._pin(ticket, wanted)
        table.looked_up(table.row, wanted.prefix, wanted.digests, hit, wanted.chunk_tokens)
        if hit < len(wanted.digests) and self._may_load(ticket.owner):
            task = wanted.load(lambda: self._loaded(ticket, wanted), lambda: self._changed(ticket, wanted))
            if task is not None:
                self._load_begun(ticket, task.cancel)

    def _may_load(self, owner: int) -> bool:
        """Whether the owner may load from L2, else it is answered from L1: one client must not keep others from L2."""
        return bool(self.storage.tiers.stores) and self._loading[owner] < MAX_LOADS

    def _load_begun(self, ticket: Ticket, cancel: Callable[[], object] | None) -> None:
        ticket.pending, ticket.decided, ticket.cancel_load = True, False, cancel
        self._loading[ticket.owner] += 1

    def _load_ended(self, ticket: Ticket) -> None:
        ticket.pending, ticket.decided, ticket.cancel_load = False, True, None
        ticket.deadline = self._clock() + self.ticket_s
        self._loading[ticket.owner] -= 1
        if not self._loading[ticket.owner]:
            del self._loading[ticket.owner]

    def _loaded(self, ticket: Ticket, wanted: Wanted) -> None:
        """Continue a lookup after its load has ended (in a storage thread), while the load still pins its objects."""
        with self._lock:
            self._load_ended(ticket)
            ticket.grown = None
            if not ticket.ended:
                self._pin(ticket, wanted)

    def _changed(self, ticket: Ticket, wanted: Wanted) -> None:
        """Note that the tiers have said what they have, that objects have arrived, or that the load has ended and pins
        nothing any more (in a storage thread)."""
        with self._lock:
            loads = ticket.pending and not ticket.ended
            if loads:
                ticket.decided, ticket.grown = True, wanted
        (self.on_growth if loads else self.on_change)(ticket.id)

    def _pin(self, ticket: Ticket, wanted: Wanted, *, use: bool = True) -> int:
        """Pin the hit in L1, in place of the ticket's former pins; return its chunks. No `use` while it grows."""
        hit, objects = wanted.find(self.storage.table.row)
        lease_id, part = "", wanted.prompt(hit)
        use = use and not (wanted.ahead and not part.retain)
        if hit:
            lease_id = self.storage.table.pin_objects(
                objects,
                owner=ticket.owner,
                request_id=ticket.request_id,
                lease_s=self.ticket_s,
                use="lookup" if use else None,
                prompt=part,
                hit=True,
            ).id
        self._unpin(ticket)
        ticket.pins, ticket.objects = lease_id, len(objects)
        ticket.hit_tokens = hit * wanted.chunk_tokens
        ticket.deadline = self._clock() + self.ticket_s
        return hit

    def _end(self, ticket: Ticket) -> int:
        """End a ticket and cancel its load; return the number of objects it had pinned."""
        ticket.ended = True
        self.on_end(ticket.id)
        del self._tickets[ticket.id]
        if ticket.cancel_load is not None:
            ticket.cancel_load()
        return self._unpin(ticket)

    def _unpin(self, ticket: Ticket) -> int:
        lease_id, ticket.pins = ticket.pins, ""
        try:
            return len(self.storage.table.unpin(lease_id, owner=ticket.owner).objects) if lease_id else 0
        except LeaseUnknown:
            return 0  # it has lapsed
