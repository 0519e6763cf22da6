"""LOOKUP, QUERY_PREFETCH_STATUS, FREE_LOOKUP_LOCKS, END_SESSION and CANCEL of a load.

Handlers run on the serving thread and never wait for L2. The storage owns the tickets, their pins and their loads.
"""

from __future__ import annotations

from collections import Counter

from kvframework.api.requests import CacheKey, ClientInfo, Handler
from kvframework.errors import LeaseUnknown, NamespaceMismatch
from kvframework.service.keys import KeyResolver, check_key
from kvframework.storage.lookup.tickets import Answer, LookupTickets, Wanted
from kvframework.storage.manager import StorageManager
from kvframework.storage.namespaces import NamespaceRecord
from kvframework.wire import messages as m
from kvframework.wire.table import REQUESTS


class Lookups:
    """The handlers of lookups. `ticket_s` is the lifetime of a ticket that is not freed, in seconds."""

    def __init__(self, storage: StorageManager, resolver: KeyResolver, *, ticket_s: float) -> None:
        self._storage = storage
        self._resolver = resolver
        self.tickets = LookupTickets(storage, ticket_s=ticket_s)
        # Changed by the serving thread only.
        self._counters = Counter(lookups=0, asked_tokens=0, hit_tokens=0, unknown_namespace=0)

    def status(self) -> dict[str, int]:
        """Return the counters. `asked_tokens` and `hit_tokens` of the fully answered lookups give the hit rate."""
        return dict(self._counters)

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [
            Handler(REQUESTS["LOOKUP"], self._lookup),
            Handler(REQUESTS["QUERY_PREFETCH_STATUS"], self._query),
            Handler(REQUESTS["FREE_LOOKUP_LOCKS"], self._free),
            Handler(REQUESTS["END_SESSION"], self._end_session),
            Handler(REQUESTS["CANCEL"], self._cancel),
        ]

    def _lookup(self, client: ClientInfo, payload: m.Lookup, _buffers: object) -> m.LookupReply:
        key = payload.key
        check_key(key)
        self._counters["lookups"] += 1
        self._counters["asked_tokens"] += key.end - key.start
        record = self._storage.records.get(key.namespace)
        asking = client.session_id, key.request_id, key.namespace
        if record is None:
            return self._reply(self.tickets.look_up_record(*asking, lambda found: self._wanted(key, found)))
        return self._reply(self.tickets.look_up(*asking, self._wanted(key, record)))

    def _query(self, client: ClientInfo, payload: m.TicketRef, _buffers: object) -> m.LookupReply:
        return self._reply(self.tickets.ask_again(payload.ticket, client.session_id))

    def _free(self, client: ClientInfo, payload: m.TicketRef, _buffers: object) -> m.Freed:
        return m.Freed(self.tickets.free(payload.ticket, client.session_id))

    def _cancel(self, client: ClientInfo, payload: m.Cancel, _buffers: object) -> m.CancelReply:
        try:
            self.tickets.free(payload.ticket, client.session_id)
        except LeaseUnknown:
            return m.CancelReply(False)
        return m.CancelReply(True)

    def _end_session(self, client: ClientInfo, payload: m.EndSession, _buffers: object) -> m.SessionEnded:
        request_id = payload.request_id or None
        tickets = self.tickets.withdraw(client.session_id, request_id)
        return m.SessionEnded(self._storage.withdraw(client.session_id, request_id), tickets)

    def _wanted(self, key: CacheKey, record: NamespaceRecord) -> Wanted:
        """Return the objects that a LOOKUP requests. Raises `NamespaceMismatch` unless the key names what was
        registered."""
        if (key.model_name, key.world_size) != (record.model_name, record.world_size):
            raise NamespaceMismatch(
                f"model {key.model_name!r}, world size {key.world_size}",
                where="key",
                available=f"model {record.model_name!r}, world size {record.world_size} in this namespace",
            )
        grid = self._resolver.resolve(key, record.desc)
        return Wanted(
            grid.main_prefix,
            grid.digests,
            grid.desc.chunk_tokens,
            grid.find,
            lambda on_done: self._storage.submit_prefetch_task(
                grid.flat,
                grid.desc,
                select=lambda available: grid.needed(grid.hit(available)),
                on_done=on_done,
            ),
        )

    def _reply(self, answer: Answer) -> m.LookupReply:
        if answer.first:
            self._counters["hit_tokens"] += answer.hit_tokens
            self._counters["unknown_namespace"] += self._storage.records.get(answer.namespace) is None
        return m.LookupReply(answer.hit_tokens, answer.ticket, answer.pending)
