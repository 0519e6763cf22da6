"""Owns LOOKUP, QUERY_PREFETCH_STATUS, FREE_LOOKUP_LOCKS, END_SESSION and CANCEL of a load: tickets and what they pin.

Handlers run on the serving thread and never wait for L2; loads end in a storage thread, and plugins pin in theirs. The
storage lock guards the tickets.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvframework.api import CacheKey, ClientInfo, Handler, MemoryLayoutDesc, PackedKey
from kvframework.errors import BadRange, LeaseUnknown, NamespaceMismatch
from kvframework.service.keys import KeyGrid, KeyResolver, check_key
from kvframework.storage.l1.objects import UNPIN_AT_ONCE
from kvframework.storage.l2.loading import LoadTask
from kvframework.storage.manager import StorageManager
from kvframework.wire import messages as m
from kvframework.wire.table import REQUESTS

# Loads of one client under way; of all clients, see `kvframework.storage.l2.prefetch`.
MAX_LOADS = 128


@dataclass(eq=False)
class Ticket:
    """One LOOKUP's: its pins, and the load that may still be under way; or what a plugin's handler pinned."""

    id: str
    owner: int
    request_id: str
    namespace: bytes = b""
    hit_tokens: int = 0
    pending: bool = False
    pins: str = ""
    objects: int = 0
    task: LoadTask | None = None
    deadline: float = 0.0
    ended: bool = False
    counted: bool = False


class Lookups:
    """Tickets belong to the client session that asked. Request ids may collide; tickets don't."""

    def __init__(self, storage: StorageManager, resolver: KeyResolver, *, ticket_s: float) -> None:
        self._storage = storage
        self._resolver = resolver
        self._ticket_s = ticket_s
        self._tickets: dict[str, Ticket] = {}
        # The client sessions that have not ended: a handler in another thread may answer one that has.
        self._owners: set[int] = set()
        # Both guarded by the storage lock.
        self._loading: Counter[int] = Counter()
        self._counters = Counter(lookups=0, asked_tokens=0, hit_tokens=0, unknown_namespace=0)

    def __len__(self) -> int:
        return len(self._tickets)

    def status(self) -> dict[str, int]:
        """Counters. `asked_tokens` and `hit_tokens` of the lookups that were answered to the end give the hit rate."""
        with self._storage.lock:
            return dict(self._counters)

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [
            Handler(REQUESTS["LOOKUP"], self._lookup),
            Handler(REQUESTS["QUERY_PREFETCH_STATUS"], self._query),
            Handler(REQUESTS["FREE_LOOKUP_LOCKS"], self._free),
            Handler(REQUESTS["END_SESSION"], self._end_session),
            Handler(REQUESTS["CANCEL"], self._cancel),
        ]

    def begin_owner(self, owner: int) -> None:
        """A client session has begun, or goes on over a further connection."""
        with self._storage.lock:
            self._owners.add(owner)

    def pin(self, owner: int, keys: Sequence[PackedKey], request_id: str) -> str:
        """See `CacheServices.pin`."""
        with self._storage.lock:
            if owner not in self._owners or not keys:
                return ""
            lease = self._storage.pin(keys, owner=owner, request_id=request_id, lease_s=self._ticket_s)
            if lease is None:
                return ""
            ticket = Ticket(secrets.token_hex(8), owner, request_id, pins=lease.id, objects=len(keys), counted=True)
            ticket.deadline = self._storage.clock() + self._ticket_s
            self._tickets[ticket.id] = ticket
            return ticket.id

    def end_session(self, owner: int) -> int:
        """A client is gone: ends its tickets, and none is given to it any more; the number ended."""
        with self._storage.lock:
            self._owners.discard(owner)
            return self.end_owner(owner)

    def end_owner(self, owner: int, request_id: str | None = None) -> int:
        """Ends a client's tickets (those of one request); the number ended."""
        with self._storage.lock:
            ending = [
                ticket
                for ticket in self._tickets.values()
                if ticket.owner == owner and (request_id is None or ticket.request_id == request_id)
            ]
            for ticket in ending:
                self._end(ticket)
            return len(ending)

    def expire(self) -> None:
        """Ends tickets whose time is over, so that a client that forgets them leaves nothing behind; the rest at the
        next tick once `UNPIN_AT_ONCE` objects are unpinned."""
        now = self._storage.clock()
        unpinned = 0
        with self._storage.lock:
            for ticket in [t for t in self._tickets.values() if not t.pending and now >= t.deadline]:
                # Its pins lapse as they end, so that their number cannot be asked for.
                unpinned += ticket.objects
                self._end(ticket)
                if unpinned >= UNPIN_AT_ONCE:
                    break

    def _lookup(self, client: ClientInfo, payload: m.Lookup, _buffers: object) -> m.LookupReply:
        key = payload.key
        check_key(key)
        if not 0 <= key.start < key.end:
            raise BadRange(f"start {key.start}, end {key.end}", where="key", available="0 <= start < end")
        ticket = Ticket(secrets.token_hex(8), client.session_id, key.request_id, key.namespace)
        with self._storage.lock:
            self._counters.update(lookups=1, asked_tokens=key.end - key.start)
            record = self._storage.records.get(key.namespace)
            if record is None:
                if self._may_load(ticket):
                    ticket.pending = self._storage.submit_record_task(key.namespace, lambda: self._know(ticket, key))
                    self._load_begun(ticket)
            else:
                self._ask(ticket, key, self._desc(key))
            return self._reply(ticket)

    def _query(self, client: ClientInfo, payload: m.TicketRef, _buffers: object) -> m.LookupReply:
        with self._storage.lock:
            return self._reply(self._own(client, payload.ticket))

    def _free(self, client: ClientInfo, payload: m.TicketRef, _buffers: object) -> m.Freed:
        with self._storage.lock:
            return m.Freed(self._end(self._own(client, payload.ticket)))

    def _cancel(self, client: ClientInfo, payload: m.Cancel, _buffers: object) -> m.CancelReply:
        with self._storage.lock:
            ticket = self._tickets.get(payload.ticket)
            found = ticket is not None and ticket.owner == client.session_id
            if ticket is not None and found:
                self._end(ticket)
            return m.CancelReply(found)

    def _end_session(self, client: ClientInfo, payload: m.EndSession, _buffers: object) -> m.SessionEnded:
        request_id = payload.request_id or None
        tickets = self.end_owner(client.session_id, request_id)
        return m.SessionEnded(self._storage.withdraw(client.session_id, request_id), tickets)

    def _desc(self, key: CacheKey) -> MemoryLayoutDesc:
        record = self._storage.records.get(key.namespace)
        if record is None:
            raise NamespaceMismatch(f"namespace {key.namespace.hex()} is unknown")
        if (key.model_name, key.world_size) != (record.model_name, record.world_size):
            raise NamespaceMismatch(
                f"model {key.model_name!r}, world size {key.world_size}",
                where="key",
                available=f"model {record.model_name!r}, world size {record.world_size} in this namespace",
            )
        return record.desc

    def _ask(self, ticket: Ticket, key: CacheKey, desc: MemoryLayoutDesc) -> None:
        """Pins what L1 answers; asks L2 for the rest."""
        grid = self._resolver.resolve(key, desc)
        hit = self._pin(ticket, grid)
        if hit < grid.chunks and self._may_load(ticket):
            ticket.task = self._storage.submit_prefetch_task(
                grid.flat,
                desc,
                select=lambda available: grid.needed(grid.hit(available)),
                on_done=lambda: self._loaded(ticket, grid),
            )
        ticket.pending = ticket.task is not None
        self._load_begun(ticket)

    def _know(self, ticket: Ticket, key: CacheKey) -> None:
        """The namespace's record has been asked of L2 (in a storage thread)."""
        with self._storage.lock:
            self._load_ended(ticket)
            if not ticket.ended and self._storage.records.get(key.namespace) is not None:
                self._ask(ticket, key, self._desc(key))

    def _loaded(self, ticket: Ticket, grid: KeyGrid) -> None:
        """A load has ended (in a storage thread), and what it loaded is still pinned by it."""
        with self._storage.lock:
            self._load_ended(ticket)
            ticket.task = None
            if not ticket.ended:
                self._pin(ticket, grid)

    def _may_load(self, ticket: Ticket) -> bool:
        """Else it is answered with what L1 has: one client does not keep the others from L2."""
        return self._storage.has_tiers and self._loading[ticket.owner] < MAX_LOADS

    def _load_begun(self, ticket: Ticket) -> None:
        if ticket.pending:
            self._loading[ticket.owner] += 1

    def _load_ended(self, ticket: Ticket) -> None:
        ticket.pending = False
        ticket.deadline = self._storage.clock() + self._ticket_s
        self._loading[ticket.owner] -= 1
        if not self._loading[ticket.owner]:
            del self._loading[ticket.owner]

    def _pin(self, ticket: Ticket, grid: KeyGrid) -> int:
        """Pins the hit of what L1 holds now under the ticket, in place of what it pinned before; the chunks. The lock
        is held."""
        hit, objects = grid.find(self._storage.row)
        before, ticket.pins = ticket.pins, ""
        ticket.deadline = self._storage.clock() + self._ticket_s
        ticket.objects = len(objects)
        if hit:
            ticket.pins = self._storage.pin_objects(
                objects, owner=ticket.owner, request_id=ticket.request_id, lease_s=self._ticket_s
            ).id
        if before:
            self._unpin(ticket.owner, before)
        ticket.hit_tokens = hit * grid.desc.chunk_tokens
        return hit

    def _reply(self, ticket: Ticket) -> m.LookupReply:
        if not ticket.pending and not ticket.counted:
            ticket.counted = True
            unknown = self._storage.records.get(ticket.namespace) is None
            self._counters.update(hit_tokens=ticket.hit_tokens, unknown_namespace=unknown)
        if not ticket.pending and not ticket.pins:
            self._tickets.pop(ticket.id, None)
            return m.LookupReply(0)
        if ticket.id not in self._tickets:
            self._tickets[ticket.id] = ticket
        return m.LookupReply(ticket.hit_tokens, ticket.id, ticket.pending)

    def _own(self, client: ClientInfo, ticket_id: str) -> Ticket:
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.owner != client.session_id:
            raise LeaseUnknown(f"there is no ticket {ticket_id!r} of this client", hint="look up again")
        return ticket

    def _end(self, ticket: Ticket) -> int:
        ticket.ended = True
        self._tickets.pop(ticket.id, None)
        if ticket.task is not None:
            ticket.task.cancel()
        return self._unpin(ticket.owner, ticket.pins) if ticket.pins else 0

    def _unpin(self, owner: int, lease_id: str) -> int:
        try:
            return len(self._storage.unpin(lease_id, owner=owner).objects)
        except LeaseUnknown:
            # END_SESSION of the same client has ended it already.
            return 0
