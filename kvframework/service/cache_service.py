"""`CacheService`: the contexts registry, key resolution and all request handlers of the core, wired together. Made by
`kvframework.server`; its handlers run on the serving thread unless they are pooled."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial

import msgspec

import kvframework
from kvframework.api.hasher import KeyHasher
from kvframework.api.installing import missing_kernels
from kvframework.api.keys import CacheKey, PackedKey
from kvframework.api.layout import Layout, MemoryLayoutDesc
from kvframework.api.listener import ChunkShape
from kvframework.api.requests import CacheServices, ClientInfo, Handler, InstanceContext, PrefetchTask, Select
from kvframework.api.transport import ServerTransport
from kvframework.bounded_calls import call_within
from kvframework.config.schema import LEAST_CHUNK, ServerConfig, TenantConfig
from kvframework.errors import NotRegistered, RequestError
from kvframework.logs.process_log import log_status
from kvframework.record_ring import RecordRing
from kvframework.service.chunks_over_wire import ChunkTransfers
from kvframework.service.contexts import Contexts, RegisteredContext, own_context
from kvframework.service.engine_driven import EngineDrivenTransfers, Grants
from kvframework.service.forgetting import Forgetting
from kvframework.service.health import EVERY_S, CounterReport, problems
from kvframework.service.keys import KeyResolver, check_key
from kvframework.service.listeners import EVENTS, Listeners
from kvframework.service.lookups import Lookups
from kvframework.service.recent_requests import FinishedRequests
from kvframework.service.records import RequestLog, TenantNames, Transfers
from kvframework.service.registration import AttachedTransport, Registrations
from kvframework.service.server_driven import ServerDrivenTransfers
from kvframework.service.usage_counts import ClientLosses
from kvframework.status import Drain
from kvframework.storage.manager import StorageManager
from kvframework.text import counted
from kvframework.wire import messages as m
from kvframework.wire.protocol import FEATURES, REQUESTS

log = logging.getLogger(__name__)

# A killed copier ends within a second, unless its driver holds it in the kernel.
TRANSPORTS_END_S = 1.2
# Time for the tiers' calls in flight, the storage threads and the arena.
STORAGE_END_S = 0.75


class CacheService(CacheServices):
    """The whole server without its sockets. Owns `storage` and closes it."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        storage: StorageManager,
        hasher: KeyHasher,
        transports: Mapping[str, AttachedTransport],
        layouts: Mapping[str, Layout],
        server_facts: Mapping[str, object],
        messaging_status: Callable[[], Mapping[str, object]],
        drain_status: Callable[[], object] = Drain,
        observe_status: Callable[[], Mapping[str, object]] = dict,
        request_durations: Callable[[], Mapping[str, object]],
        tenants: Sequence[TenantConfig] = (),
        listeners: Listeners | None = None,
    ) -> None:
        self._stopping = False
        self._listeners = listeners or Listeners(RecordRing())
        self.boot_id = secrets.token_bytes(16)
        self.chunk_size = config.most_chunk
        self.contexts: Contexts = {}
        self.storage = storage
        self.hasher = hasher
        self._config = config
        storage.table.configure_share(config.pin_share)
        self._transports = transports
        self._tenants = TenantNames(tenants, config.ticket_s)
        self._resolver = KeyResolver(hasher, storage.records.orders, self._owned if tenants else None)
        self._registrations = Registrations(
            self.contexts, storage.records, transports, layouts, self.chunk_size, self._least_chunk, hasher.fingerprint
        )
        requests = self._request_log = RequestLog(storage.clock, self._tenants, self._listeners.ring)
        self.start = requests.start
        self.finished = FinishedRequests(self.boot_id, requests)
        grants = Grants(self.contexts, storage, requests)
        lookups = self.lookups = Lookups(
            storage,
            self._resolver,
            requests,
            grants,
            ticket_s=config.ticket_s,
            price=config.price,
            trace_memory=config.trace_memory,
        )
        why_missed = lookups.miss_facts.of_retrieve
        transfers = Transfers(self.contexts, self._resolver, storage.table, requests, why_missed, self.chunk_size)
        self._chunks = ChunkTransfers(transfers, workers=config.workers)
        # Objects just read over the wire count as in use for a moment longer.
        forgetting = Forgetting(storage, self._tenants, hasher, self._chunks.settle)
        self._resolver.on_conversation = forgetting.conversations.add
        self._engine_driven = EngineDrivenTransfers(transfers, grants, config)
        self._losses = ClientLosses()
        self._server_facts = {"boot_id": self.boot_id.hex(), **server_facts}
        self._started = time.monotonic()
        self._started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._messaging_status, self._observe_status = messaging_status, observe_status
        self._drain_status = drain_status
        self._request_durations = request_durations
        self._report = CounterReport(time.monotonic())
        self._parts = (
            self._registrations,
            self._engine_driven,
            ServerDrivenTransfers(transfers),
            self._chunks,
            lookups,
            lookups.recording,
            self.finished,
            forgetting,
        )
        self._of_sessions = (self._losses, lookups, transfers, grants)

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        """Return the handlers of every core request that the message server does not answer itself."""
        own: list[Handler] = [  # type: ignore[type-arg]
            Handler(REQUESTS["PING"], self._ping),
            Handler(REQUESTS["NOOP"], lambda _client, payload, _buffers: payload),
            Handler(REQUESTS["GET_CHUNK_SIZE"], self._get_chunk_size),
            Handler(REQUESTS["CLEAR"], self._clear, pooled=True, ordered=True),
            Handler(REQUESTS["REPORT_STATUS"], self._report_status, pooled=True, ordered=True),
        ]
        return own + [handler for part in self._parts for handler in part.handlers()]

    def report(self) -> dict[str, object]:
        """Return the status document, see docs/status.md. Blocks for some milliseconds; from a worker thread."""
        # `list` in one step: the serving thread may change the registry meanwhile.
        contexts = sorted(list(self.contexts.values()), key=lambda context: context.instance_id)  # noqa: C414
        document: dict[str, object] = {
            "server": {
                "version": kvframework.__version__,
                "started_at": self._started_at,
                "uptime_s": round(time.monotonic() - self._started, 1),
                "chunk_size": self.chunk_size,
                "least_chunk": self._least_chunk() or self.chunk_size,
                "missing_kernels": list(missing_kernels()),
                **self._server_facts,
            },
            "instances": [context.describe(self.chunk_size) for context in contexts],
            "gpu_instance_ids": [context.instance_id for context in contexts if context.is_gpu],
            "non_gpu_instance_ids": [context.instance_id for context in contexts if not context.is_gpu],
            "namespaces": sorted({context.namespace.hex() for context in contexts}),
            "tickets": len(self.lookups.tickets),
            "lookups": self.lookups.status(),
            "price": self.lookups.pricing.status(),
            "use": self.lookups.use.status(),
            "requests": self._request_durations(),
            "drain": self._drain_status(),
            "transports": {
                name: each.server.status() if each.server else {} for name, each in self._transports.items()
            },
            **self._counted(),
        }
        return {**document, "problems": problems(document)}

    def _counted(self) -> dict[str, object]:
        """Return the parts of the document whose counters of failures the log reports as they grow."""
        return {
            **self.storage.status(),
            "losses": self._losses.status(),
            "messaging": self._messaging_status(),
            "observe": self._observe_status(),
            "log": log_status(),
            "events": self._listeners.status(EVENTS),
            "listeners": self._listeners.others(),
        }

    def _report_status(self, _client: ClientInfo, _payload: m.Empty, _buffers: object) -> m.StatusReply:
        return m.StatusReply(msgspec.json.encode(self.report()))

    def configure(self, config: ServerConfig) -> None:
        """Change what of `[server]` may change while it runs, see `kvframework.running_config`. From any thread."""
        self._engine_driven.config = config
        self._config = config
        self.storage.table.configure_share(config.pin_share)
        self.lookups.tickets.ticket_s = config.ticket_s
        self.lookups.pricing.on = config.price
        self.lookups.recording.configure(most_bytes=config.trace_memory)

    def welcome(self, _hello: m.Hello, client: ClientInfo, version: int, returns: bool) -> m.HelloReply:
        """The service's part of the answer to HELLO; `returns`: the client has used an earlier server."""
        self.lookups.tickets.begin_owner(client.session_id)
        self.lookups.use.begin_session(client)
        from_before = returns and self.storage.table.began_empty
        self.lookups.miss_facts.begin_session(client.session_id, from_before=from_before)
        return m.HelloReply(
            version=version,
            boot_id=self.boot_id,
            session=b"",
            chunk_size=self.chunk_size,
            hasher=self.hasher.name,
            hasher_fingerprint=self.hasher.fingerprint,
            transports=tuple(self._transports),
            features=(*FEATURES, *self._listeners.features),
            tp_lcm=self._config.tp_lcm,
            pp_lcm=self._config.pp_lcm,
            least_chunk=self._least_chunk(),
        )

    @property
    def chunks(self) -> str:
        """The tokens of a chunk, as text: of one size, or by the model."""
        return f"{least} to {self.chunk_size} tokens" if (least := self._least_chunk()) else f"{self.chunk_size} tokens"

    def _least_chunk(self) -> int:
        """Return `least` for `with_chunk`: a chunk holds whole blocks of each listener."""
        least = math.lcm(LEAST_CHUNK, self._listeners.block_tokens)
        return 0 if self._config.chunk_size or least > self.chunk_size else least

    def stop(self) -> None:
        """Have sessions end with the server, not with their clients, and hold no answer back. From any thread."""
        self._stopping = self.lookups.waits.closing = True

    def end_session(self, client: ClientInfo) -> None:
        """End the instances, tickets, pins and reservations of a session: its client or this server has ended."""
        instances = self._registrations.end_session(client)
        tickets = self.lookups.tickets.end_owner(client.session_id)
        self._request_log.count()  # on the session's own accounts, as long as it has any
        # A client outlives this server: it may write into what it has reserved, which the next one has to know, and
        # reads what it has pinned, which no load that is under way may replace.
        leases = 0 if self._stopping else self.storage.table.end_owner(client.session_id)
        for part in self._of_sessions:
            part.end_session(client.session_id)
        if not (instances or tickets or leases):
            return
        who = (client.name, client.pid)
        amounts = (counted(instances, "instances"), counted(tickets, "tickets"), counted(leases, "leases"))
        if self._stopping:
            log.info("closed the session of %s (process %d), because the server stops: %s, %s and %s", *who, *amounts)
        else:
            log.info("client %s (process %d) has ended, which frees %s, %s and %s", *who, *amounts)

    def tick(self) -> None:
        """Maintain leases, tickets and watermarks; called about every 100 ms, on the serving thread."""
        self.lookups.tickets.expire()
        self._chunks.tick()
        self.storage.table.tick()
        self.lookups.recording.expire()
        now = time.monotonic()
        if self._report.is_due(now):
            grown = self._report.changes(self._counted(), now)
            if grown:
                log.warning("in the last %.0f s: %s", EVERY_S, grown)

    def close(self, by: float | None = None, *, process_ends: bool = False) -> None:
        """Close contexts, transports and storage, after the last request. Errors of a transport are logged. With `by`,
        of the monotonic clock, everything has ended by then or is left to the end of the process, and pending writes to
        L2 get the remaining time; without it, L2 gets no time. See `StorageManager.close`."""
        self._request_log.stop()
        contexts = list(self.contexts.values())
        self.contexts.clear()
        closing = {
            f"transport {name}": partial(_close_transport, name, transport.server, contexts)
            for name, transport in self._transports.items()
            if transport.server is not None
        }
        late = call_within(TRANSPORTS_END_S, {**closing, "the wire path": self._chunks.close})
        if late:
            log.error("the server ends before it could close %s", " and ".join(late))
        if by is None:
            self.storage.close(process_ends=process_ends)
            return
        left = max(by - time.monotonic(), 0.0)
        self.storage.close(max(left - STORAGE_END_S, 0.0), min(left, STORAGE_END_S), process_ends=process_ends)

    def shape_of(self, namespace: bytes, cache_salt: str) -> ChunkShape | None:
        """Return the objects that a hit of a namespace and salt needs for each chunk, None for a namespace that is not
        known: of windows and states only some chunks have objects. From any thread."""
        record = self.storage.records.get(namespace)
        if record is None:
            return None
        groups = record.desc.groups
        needed = [index for index, group in enumerate(groups) if not group.window] or range(len(groups))
        prefixes = self._resolver.prefixes(namespace, cache_salt, range(record.world_size), len(groups))
        of_rank = [prefixes[at : at + len(groups)] for at in range(0, len(prefixes), len(groups))]
        rows = [each[index] for each in of_rank for index in needed]
        return ChunkShape(record.model_name, record.desc.chunk_tokens, rows)

    # CacheServices, for the request handlers of plugins

    def instance(self, instance_id: int, client: ClientInfo | None = None) -> InstanceContext:
        if client is not None:
            return own_context(self.contexts, instance_id, client)
        context = self.contexts.get(instance_id)
        if context is None:
            raise NotRegistered(f"instance {instance_id} is not registered", hint="send REGISTER_KV_CACHE first")
        return context

    def resolve_keys(self, key: CacheKey) -> Mapping[tuple[int, int], Sequence[PackedKey]]:
        check_key(key)
        return self._resolver.resolve(key, self._known_desc(key.namespace)).by_row()

    def key_prefixes(self, namespace: bytes, cache_salt: str, ranks: Sequence[int]) -> Sequence[bytes]:
        return self._resolver.prefixes(namespace, cache_salt, ranks, len(self._known_desc(namespace).groups))

    def layout_desc(self, namespace: bytes) -> MemoryLayoutDesc | None:
        record = self.storage.records.get(namespace)
        return record.desc if record else None

    def present(self, keys: Sequence[PackedKey]) -> Sequence[bool]:
        return self.storage.table.which_present(keys)

    def pin(self, client: ClientInfo, keys: Sequence[PackedKey], request_id: str = "") -> str:
        return self.lookups.tickets.pin(client.session_id, keys, request_id)

    def submit_prefetch_task(
        self, keys: Sequence[PackedKey], layout_desc: MemoryLayoutDesc, *, select: Select | None = None
    ) -> PrefetchTask | None:
        return self.storage.tiers.submit_prefetch_task(keys, layout_desc, select=select)

    def _ping(self, client: ClientInfo, payload: m.Ping, _buffers: Sequence[memoryview]) -> m.Pong:
        self._losses.heard(client, payload.lost)
        if payload.free:
            self.lookups.free(client, payload.free)
        return m.Pong(self.boot_id)

    def _owned(self, cache_salt: str, salts: Iterable[bytes]) -> None:
        """Tell the storage whose the objects with these salts are."""
        tenant = self._tenants.number(cache_salt)
        if tenant:
            for salt in salts:
                self.storage.table.belongs(salt, tenant)

    def _known_desc(self, namespace: bytes) -> MemoryLayoutDesc:
        desc = self.layout_desc(namespace)
        if desc is None:
            raise RequestError(f"namespace {namespace.hex()} is not registered", hint="register an instance first")
        return desc

    def _get_chunk_size(self, _client: ClientInfo, payload: m.GetChunkSize, _buffers: object) -> m.ChunkSize:
        namespace = payload.namespace
        return m.ChunkSize(self._known_desc(namespace).chunk_tokens if namespace else self.chunk_size)

    def _clear(self, client: ClientInfo, payload: m.Clear, _buffers: object) -> m.Cleared:
        if not client.local:
            raise RequestError(
                "only a client on this node may clear the cache", available="a client on this node, over ipc://"
            )
        # Objects just read over the wire count as in use for a moment longer.
        self._chunks.settle()
        cleared = self.storage.clear(l2=payload.l2, model=payload.model)
        if payload.l2:
            self.lookups.miss_facts.tiers_cleared(payload.model)
        return cleared


def _close_transport(name: str, transport: ServerTransport, contexts: Sequence[RegisteredContext]) -> None:
    own = {f"instance {each.instance_id}": each.memory for each in contexts if each.transport == name}
    for what, part in {**own, f"transport {name}": transport}.items():
        try:
            if part is not None:
                part.close()
        except Exception:
            log.exception("closing %s failed", what)
