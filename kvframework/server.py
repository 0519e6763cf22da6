"""The composition root of a server: configuration -> plugins -> storage -> service -> messaging. No other module knows
all of them. `serve_forever` makes the calling thread the serving thread."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import kvframework
from kvframework.api.codec import Codec, CodecProvider
from kvframework.api.endpoint import ObserveConfig
from kvframework.api.eviction import EvictionPolicy, EvictionProvider
from kvframework.api.hasher import HasherProvider, KeyHasher
from kvframework.api.installing import warn_of_missing_kernels
from kvframework.api.layout import Layout, LayoutProvider
from kvframework.api.listener import Listener, ListenerProvider
from kvframework.api.memory import Memory, MemoryContext, MemoryProvider, TableContext
from kvframework.api.plugin import ByteSize, Provider
from kvframework.api.requests import Handler, RequestsProvider
from kvframework.api.tier import NodeIdentity, Tier, TierProvider
from kvframework.api.transport import ServerTransport, TransportProvider
from kvframework.config.endpoint import default_endpoint
from kvframework.config.schema import Config, L2Config, PluginTable
from kvframework.config.tenants import bytes_of_tenants, shares_of_tenants
from kvframework.errors import PluginBroken
from kvframework.keeper.sd_notify import held_since
from kvframework.logs.process_log import LogForm, change_logging, chosen_log
from kvframework.messaging.curve import ServerKeys
from kvframework.messaging.server.loop import MessageServer, Served
from kvframework.record_ring import RecordRing
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import Creator, codec_tables, resolve_table, server_terms
from kvframework.running_config import RunningConfig
from kvframework.service.cache_service import CacheService
from kvframework.service.listeners import Listeners, ServerContext
from kvframework.service.operator_requests import Diagnosis, Drain, HandOver
from kvframework.service.registration import AttachedTransport
from kvframework.storage.l1.eviction import Tenant
from kvframework.storage.l1.journal import Identity
from kvframework.storage.l1.leases import NOTHING_PINNED
from kvframework.storage.l2.sealed_tier import CodecTable, L2Store, Watermarks
from kvframework.storage.l2.writer import AttachedTier
from kvframework.storage.manager import PeerExport, StorageManager
from kvframework.storage.namespaces import NamespaceRecords
from kvframework.storage.recovery import Keeper, Recovery, free_recoverable, recover, this_machine
from kvframework.storage.table import Table
from kvframework.supervise.child import SupervisedChild, start_process
from kvframework.supervise.state import HEALTHY_S

log = logging.getLogger(__name__)

# Seconds from the signal to the end: first requests in flight, transports and closing the storage, then writes to L2.
STOP_S = 3.5
GRACE_S = 1.0
OBSERVE_STOP_S = 0.5
# How long a server that nobody needs writes to its tiers what only L1 holds, before it stops.
IDLE_DRAIN_S = 300.0


class Server:
    """One node's server. The constructor raises `ConfigError` and `PluginError`, before it binds anything.
    `keeper` holds L1 while no server lives."""

    def __init__(self, config: Config, registry: PluginRegistry | None = None, keeper: Keeper | None = None) -> None:
        self.endpoint = config.server.endpoint or default_endpoint()
        self._stop_by: float | None = None
        self._config = config
        self._registry = registry or PluginRegistry()
        self._creator = Creator(self._registry)
        self._keeper = keeper
        keys = config.server.curve
        curve = ServerKeys.load(Path(keys.secret_key), Path(keys.clients)) if keys else None
        hasher = self._maker(config.hasher, HasherProvider, KeyHasher)()
        layouts = {table.use: self._maker(table, LayoutProvider, Layout)() for table in config.layout}
        self._observer = ObserveSupervisor(self.endpoint, config.observe) if config.observe else None
        self._listeners = Listeners(RecordRing(wanted=bool(config.listener)))
        self._tiers: list[tuple[L2Config, Tier]] = []
        identity = partial(self._identity, hasher)
        storage = self._storage(identity)
        transports = {table.use: self._transport(table, storage.table.arena_fd) for table in config.transport}
        self.drain = Drain(storage, self.stop)
        self.service = CacheService(
            config.server,
            storage=storage,
            hasher=hasher,
            transports=transports,
            layouts=layouts,
            server_facts={
                "pid": os.getpid(),
                "endpoint": self.endpoint,
                "tcp": config.server.tcp,
                "config": config.source,
            },
            observe_status=self._observer.status if self._observer else dict,
            messaging_status=lambda: self._messaging_status(),
            drain_status=self.drain.status,
            request_durations=lambda: self._messages.durations(),
            tenants=config.tenants,
            listeners=self._listeners,
        )
        for table in config.listener:
            self._listen(table, hasher, curve)
        self._node = PeerExport(
            storage, NodeIdentity(self.service.boot_id, self.service.chunk_size, hasher.fingerprint)
        )
        self.running = RunningConfig(config, self._registry, self._configure)
        self._hand_over = HandOver(
            lambda: storage.table.hand_over(identity(), self._tenant_names), self.drain, held_since()
        )
        self._messages = MessageServer(
            self.endpoint,
            Served(
                handlers=self._handlers(self._hand_over),
                welcome=self.service.welcome,
                hasher_fingerprint=hasher.fingerprint,
                arena_for=self.service.storage.table.arena_for,
                on_session_end=self.service.end_session,
                on_tick=self._tick,
                next_at=self.service.lookups.waits.next_at,
                on_time=self.service.lookups.answer_waits,
            ),
            session_timeout_s=config.server.session_timeout_s,
            workers=config.server.workers,
            tcp=config.server.tcp,
            curve=curve,
            admit_uids=config.server.admit_uids,
            admit_readers=self._listeners.doors.admit if config.listener else None,
        )
        self.service.lookups.waits.wake = self._messages.wake
        # When an engine was last connected.
        self._used_at = time.monotonic()

    def bind(self) -> None:
        """Start the listeners and bind the sockets, before `serve_forever`. Raises `EndpointError`, or as listeners."""
        keeps = self.service.storage.table.is_recoverable and self._keeper is not None and self._keeper.lasts
        self._listeners.start(keeps=keeps)
        self.service.start()
        for table, tier in self._tiers:
            self._creator.call("tier", table.tier, tier.attach, self._node, name="attach")
        self._messages.bind()
        if self._observer is not None:
            self._observer.start()

    def serve_forever(self, *, process_ends: bool = False) -> None:
        """Serve until `stop`, then close everything, within `STOP_S` seconds. `process_ends` means that the process
        ends right afterwards: the kernel then unmaps the arena, which takes a second for some gigabytes."""
        log.info(
            "kvframework %s, process %d, boot %s: L1 %s, L2 %s, chunks of %s, configuration %s",
            kvframework.__version__,
            os.getpid(),
            self.service.boot_id.hex()[:8],
            ByteSize(self.service.storage.table.capacity),
            " and ".join(table.tier.use for table in self._config.l2) or "none",
            self.service.chunks,
            self._config.source,
        )
        log.info("serving at %s", " and ".join(filter(None, (self.endpoint, self._config.server.tcp))))
        warn_of_missing_kernels()
        if self._config.server.insecure:
            log.warning("insecure = true: the server accepts every TCP client, without encryption")
        try:
            self._messages.serve_forever()
            self.service.storage.table.served()
        finally:
            self.close(process_ends=process_ends)
            log.info("stopped")

    def stop(self, since: float | None = None) -> None:
        """End `serve_forever` within `STOP_S` seconds from `since`, of the monotonic clock (None: now); requests in
        flight get `GRACE_S` of them. Safe from any thread and from a signal handler, also before `serve_forever`."""
        self.service.stop()
        now = time.monotonic()
        late = 0.0 if since is None else now - since
        self._stop_by = now + STOP_S - late
        self._messages.stop(max(GRACE_S - late, 0.0))

    def end(self, since: float) -> None:
        """End as a signal of that time asks: after a drain of `[server] drain_s`, or as `stop`. Safe as that."""
        drain_s = self._config.server.drain_s
        if drain_s or self.drain.running:
            self.drain.begin(max(drain_s - (time.monotonic() - since), 0.0))
        else:
            self.stop(since)

    def close(self, *, process_ends: bool = False) -> None:
        """Close a server that has stopped serving (or never served); pending writes to L2 get the time left."""
        by = time.monotonic() + STOP_S if self._stop_by is None else self._stop_by
        if self._observer is not None:
            self._observer.stop()
        self._listeners.stop(handed_over=self._hand_over.done)
        self.service.close(by, process_ends=process_ends)

    def abandon(self) -> None:
        """Remove the endpoint's files, for a process that ends at once. Safe from any thread."""
        self._messages.abandon()

    def _tick(self) -> None:
        self.service.tick()
        self.drain.tick()
        limit, now = self._config.server.idle_stop_s, time.monotonic()
        if self.service.contexts:
            self._used_at = now
            if self.drain.idle:
                self.drain.cancel()
        elif limit and not self.drain.running and now - self._used_at >= limit:
            log.info("the server stops: no engine was connected for %.0f s, [server] idle_stop_s", limit)
            self.drain.by_itself = True
            self.drain.begin(IDLE_DRAIN_S, idle=True)

    def _configure(self, config: Config) -> None:
        """Change what `kvframework.running_config` says can change now. From any thread; cannot fail."""
        change_logging(config.log.level, config.log.format)
        self.service.configure(config.server)
        self._messages.configure(session_timeout_s=config.server.session_timeout_s)
        self.service.storage.table.configure(config.l1.keys)
        self.service.storage.tiers.configure([l2.keys for l2 in config.l2])

    def _maker(self, table: PluginTable, descriptor: type[Provider[Any]], contract: type[Any]) -> Callable[..., Any]:
        """What makes the object of a table, with further arguments of `create`, if there are any."""
        provider: Any
        provider, options = resolve_table(self._registry, table, descriptor)
        return partial(self._creator.one, descriptor.kind, table, contract, provider.create, options)

    def _transport(self, table: PluginTable, arena_fd: int) -> AttachedTransport:
        provider, options = resolve_table(self._registry, table, TransportProvider)
        make = provider.create_server
        server = make and self._creator.one("transport", table, ServerTransport, make, options, arena_fd)
        return AttachedTransport(provider.name, provider.is_gpu, server)

    def _listen(self, table: PluginTable, hasher: KeyHasher, curve: ServerKeys | None) -> None:
        present, doors = self.service.storage.table.which_present, self._listeners.doors
        terms, admitted = server_terms(self._config), self._config.server.admit_uids
        context = ServerContext(table.where, terms, hasher, present, self.service.shape_of, doors, curve, admitted)
        self._listeners.add(table.use, self._maker(table, ListenerProvider, Listener)(context))

    def _storage(self, identity: Callable[[], Identity]) -> StorageManager:
        config = self._config
        new_policy = self._maker(config.l1.eviction, EvictionProvider, EvictionPolicy)
        records = NamespaceRecords()
        tables = codec_tables(config)
        required = [each.use for each in tables if resolve_table(self._registry, each, CodecProvider)[0].required]
        codecs = CodecTable({each.use: self._maker(each, CodecProvider, Codec) for each in tables}, required)
        tiers = [self._tier(table, codecs, records) for table in config.l2]
        arena, recovery = self._memory(identity)
        shares = bytes_of_tenants(config.tenants, arena.capacity)
        table = Table(
            arena,
            new_policy(),
            records=records,
            high_watermark=config.l1.keys.high_watermark,
            low_watermark=config.l1.keys.low_watermark,
            ghosts=config.l1.keys.ghosts,
            ring=self._listeners.ring,
            recovery=recovery,
            tenants=[
                Tenant(tenant.name, least, most, new_policy())
                for tenant, (least, most) in zip(config.tenants, shares, strict=True)
            ],
        )
        return StorageManager(table, tiers)

    def _memory(self, identity: Callable[[], Identity]) -> tuple[Memory, Recovery]:
        table = self._config.l1.memory
        provider, _ = resolve_table(self._registry, table, MemoryProvider)

        def create(kept: int | None) -> Memory:
            context = MemoryContext(table.where, kept=kept, outlives=provider.keeps and self._keeper is not None)
            made: Memory = self._maker(table, MemoryProvider, Memory)(context)
            return made

        if self._keeper is None:
            return create(None), Recovery(why_cold="no_keeper")
        if not provider.keeps:
            free_recoverable(self._keeper)  # there is never memory for two arenas
            log.info("L1 began empty: memory_cannot")
            return create(None), Recovery(why_cold="memory_cannot")
        return recover(self._keeper, identity(), self._tenant_names, create)

    def _identity(self, hasher: KeyHasher) -> Identity:
        table = self._config.l1.memory
        _, options = resolve_table(self._registry, table, MemoryProvider)
        return Identity(
            chunk_size=self._config.server.most_chunk,
            hasher=hasher.fingerprint,
            memory=table.use,
            options=msgspec.json.encode(options, enc_hook=str, order="sorted").decode(),
            arena=(0, 0),
            machine=this_machine(),
        )

    @property
    def _tenant_names(self) -> list[str]:
        return [tenant.name for tenant in self._config.tenants]

    def _tier(self, table: L2Config, codecs: CodecTable, records: NamespaceRecords) -> AttachedTier:
        provider, _ = resolve_table(self._registry, table.tier, TierProvider)
        keys = table.keys
        tier = self._maker(table.tier, TierProvider, Tier)(TableContext(table.tier.where))
        self._tiers.append((table, tier))
        store = L2Store(
            tier,
            timeout_s=keys.timeout_s,
            codec=keys.codec,
            codecs=codecs,
            layout_of=records.layout_of,
            dtype_of=records.dtype_of,
            watermarks=Watermarks(keys.high_watermark, keys.low_watermark),
        )
        return AttachedTier(
            store,
            keys.write_policy,
            keys.write_queue,
            keys.promote,
            loads=keys.loads or provider.loads,
            writes=keys.writes or provider.writes,
            shares=shares_of_tenants(self._config.tenants),
        )

    def _handlers(self, hand_over: HandOver) -> dict[str, Handler[Any]]:
        diagnosis = Diagnosis(
            {"status": self.service.report, "config": self.running.shown},
            self.service.finished,
            secrets=self.running.secrets,
            models=lambda: self.service.storage.records.models().keys(),
        )
        parts = (self.service, self.running, diagnosis, hand_over, self.drain)
        own = [handler for part in parts for handler in part.handlers()]
        handlers = {handler.spec.name: handler for handler in own}
        for table in self._config.requests:
            provider, options = resolve_table(self._registry, table, RequestsProvider)
            made = self._creator.several("requests", table, Handler, provider.create, options, self.service)
            for handler in made:
                name = handler.spec.name
                if not name.startswith(f"{provider.name}.") or name in handlers:
                    raise PluginBroken(
                        f"requests.{provider.name} declares a request {name!r}",
                        where=table.where,
                        available=f"names that start with '{provider.name}.', each once",
                    )
                handlers[name] = handler
        return handlers

    def _messaging_status(self) -> dict[str, object]:
        pinned = self.service.storage.table.pinned_bytes()
        return {
            "counters": dict(self._messages.counters),
            "descriptors": self._messages.descriptors(),
            "sessions": [
                {
                    "session_id": s.session_id,
                    "pid": s.pid,
                    "name": s.name,
                    "local": s.local,
                    "version": s.version,
                    "client_version": s.client_version,
                    "pinned_bytes": pinned.get(s.session_id, NOTHING_PINNED).nbytes,
                    "over_share": pinned.get(s.session_id, NOTHING_PINNED).cut,
                }
                for s in self._messages.sessions
            ],
            "refused": self._messages.refusals.report(),
        }


class ObserveSupervisor(SupervisedChild):
    """Keeps a process of `kvframework observe` from `start` to `stop`. Its failure never concerns the server."""

    def __init__(self, endpoint: str, config: ObserveConfig) -> None:
        super().__init__("`kvframework observe`", thread="kvf-observe", stop_s=OBSERVE_STOP_S)
        self._config = config
        form = chosen_log() or LogForm("info", "human")
        start = {"parent": os.getpid(), "endpoint": endpoint, "config": config, "log": form}
        self._argument = msgspec.json.encode(start).decode()
        self._started = 0.0

    def spawn(self) -> subprocess.Popen[bytes]:
        self._started = time.monotonic()
        return start_process("kvf_observe.process", self._argument)

    def stop(self) -> None:
        """End the process, which is killed after `OBSERVE_STOP_S` seconds, and wait for that. Idempotent."""
        super().stop()
        self.join(2 * OBSERVE_STOP_S)

    def ended(self, why: str) -> None:
        if why:
            log.error("there are no metrics until kvframework observe runs again: %s", why)

    def status(self) -> dict[str, object]:
        """Return the part of the status; `problem` is "" once a process has run for `HEALTHY_S`. From any thread."""
        pid = self.pid
        healthy = pid is not None and time.monotonic() - self._started >= HEALTHY_S
        return {
            "listen": self._config.listen,
            "pid": pid,
            "starts": self.starts,
            "problem": "" if healthy else self.last_error,
        }
