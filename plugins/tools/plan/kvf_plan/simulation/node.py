"""One node under virtual time: the server's service, storage, policies and write policies, without its sockets and
threads, over tiers that only know what they hold."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvf_plan.errors import SimulationError
from kvf_plan.simulation.events import VirtualTime
from kvf_plan.simulation.sizes import Sizes
from kvf_plan.simulation.threads import Sleep, VirtualThreads
from kvf_plan.simulation.tier import VirtualTier
from kvframework.api.eviction import EvictionPolicy, EvictionProvider
from kvframework.api.hasher import HasherProvider, KeyHasher
from kvframework.api.memory import Memory
from kvframework.api.requests import ClientInfo, Message
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import Creator, resolve_table
from kvframework.service.cache_service import CacheService
from kvframework.service.registration import AttachedTransport
from kvframework.storage.l2.sealed_tier import L2Store, Watermarks
from kvframework.storage.l2.writer import AttachedTier
from kvframework.storage.manager import StorageManager
from kvframework.storage.namespaces import NamespaceRecords
from kvframework.storage.table import Table
from kvframework.wire import messages as m
from kvframework.wire.protocol import non_gpu_namespace

TICK_S = 0.1
# Ticks with nothing to do, after which they become rare: no one sees a difference, and a night takes no time.
QUIET_TICKS = 600
MOST_DOUBLINGS = 64
MODEL = "simulated"
TRANSPORT = "virtual"


class VirtualMemory(Memory):
    """All zeros."""

    fd = -1

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        try:
            self._map = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        except (OSError, OverflowError) as error:
            raise SimulationError(
                f"L1 is too large to be simulated: {error}",
                where="[l1] capacity",
                hint="set a capacity that a node can have",
            ) from None

    def start(self, on_ready: Callable[[int], None]) -> None:
        on_ready(self.capacity)

    def view(self) -> memoryview:
        return memoryview(self._map)

    def close(self) -> None:
        self._map.close()


class Session(ClientInfo):
    """A client of the node: an engine."""

    pid = 1
    name = "engine"
    local = True

    def __init__(self, session_id: int) -> None:
        self.session_id = session_id


class Node:
    """`sessions` are those of the engines, each with an instance of its session's number."""

    def __init__(self, sizes: Sizes, registry: PluginRegistry, time: VirtualTime, engines: int) -> None:
        config = sizes.config
        creator = Creator(registry)
        self.time = time
        sleep = Sleep(time)
        records = NamespaceRecords()
        self.tiers = [
            VirtualTier(each.speed, time, sleep, start=time.now, scale=sizes.scale, layout_of=records.layout_of)
            for each in sizes.tiers
        ]
        attached = [
            AttachedTier(
                L2Store(
                    tier,
                    timeout_s=each.keys.timeout_s,
                    layout_of=records.layout_of,
                    watermarks=Watermarks(each.keys.high_watermark, each.keys.low_watermark),
                    clock=time.clock,
                    scale=sizes.scale,
                ),
                each.keys.write_policy,
                each.keys.write_queue,
                each.keys.promote,
                loads=each.loads,
                writes=each.writes,
            )
            for tier, each in zip(self.tiers, sizes.tiers, strict=True)
        ]
        provider, options = resolve_table(registry, config.l1.eviction, EvictionProvider)
        policy: EvictionPolicy = creator.one("eviction", config.l1.eviction, EvictionPolicy, provider.create, options)
        table = Table(
            VirtualMemory(sizes.l1_bytes),
            policy,
            records=records,
            high_watermark=config.l1.keys.high_watermark,
            low_watermark=config.l1.keys.low_watermark,
            ghosts=config.l1.keys.ghosts,
            clock=time.clock,
        )
        self.storage = StorageManager(table, attached, threads=False)
        self._threads = VirtualThreads(time, self.storage.tiers.controllers, sleep)
        hashing, hash_options = resolve_table(registry, config.hasher, HasherProvider)
        hasher: KeyHasher = creator.one("hasher", config.hasher, KeyHasher, hashing.create, hash_options)
        self.service = CacheService(
            config.server,
            storage=self.storage,
            hasher=hasher,
            transports={TRANSPORT: AttachedTransport(TRANSPORT, False, None)},
            layouts={},
            server_facts={},
            messaging_status=dict,
            request_durations=dict,
        )
        # Ticks in a row with nothing to do, and the number of the chain of ticks that goes on.
        self._quiet = self._chain = 0
        self._handle = {handler.spec.name: handler.call for handler in self.service.handlers()}
        self.sessions = [Session(number) for number in range(1, engines + 1)]
        for session in self.sessions:
            self.service.welcome(m.Hello(client=session.name, pid=session.pid), session, 1, False)
            payload = m.RegisterNonGpuContextPayload(
                instance_id=session.session_id,
                model_name=MODEL,
                world_size=1,
                block_size=1,
                num_layers=1,
                hidden_dim_size=1,
                dtype_str="uint8",
                use_mla=True,
            )
            self.call(session, "REGISTER_KV_CACHE_NON_GPU_CONTEXT", payload)
        self.namespace = non_gpu_namespace(payload, hasher.fingerprint, sizes.chunk_tokens)
        # What asks a tier whether it still answers can be left out: it does.
        self._is_steady = not any(tier.speed.slow for tier in self.tiers)
        self._having_all = [tier for tier in self.tiers if tier.speed.has_all]
        (self._prefix,) = self.service.key_prefixes(self.namespace, "", (0,))
        self._object_bytes = sizes.chunk_tokens
        self._tick_in(TICK_S)

    def call(self, session: Session, name: str, payload: Message) -> Any:
        """Ask the server; return its answer, or a future of it."""
        if self._quiet > QUIET_TICKS:
            self._awake()
        self._quiet = 0
        return self._handle[name](session, payload, ())

    def settle(self) -> None:
        """Do what the storage threads and the serving thread would do now: after each event."""
        self._threads.look()
        if self._quiet > QUIET_TICKS and not self.storage.at_rest:
            self._awake()
        lookups = self.service.lookups
        while lookups.waits.next_at() <= self.time.now:
            lookups.answer_waits()
            self._threads.look()

    def stored(self, digests: Sequence[bytes]) -> None:
        """Engines have stored these chunks: tiers that have all get them."""
        for tier in self._having_all:
            tier.knows([self._prefix + digest for digest in digests], self._object_bytes)

    @property
    def at_rest(self) -> bool:
        """Whether the storage has nothing left to do."""
        return self.storage.at_rest and not self._threads.busy

    def close(self) -> None:
        self._threads.close()
        self.service.close()

    def _tick(self, chain: int) -> None:
        if chain != self._chain:
            return
        self.service.tick()
        # A thread that asks whether a tier answers is no work.
        self._quiet = self._quiet + 1 if self.storage.at_rest else 0
        rarely = 2.0 ** min(max(self._quiet - QUIET_TICKS, 0), MOST_DOUBLINGS)
        if self._is_steady:
            self._threads.rarely = rarely
        self._tick_in(TICK_S * rarely)

    def _tick_in(self, seconds: float) -> None:
        self.time.at(self.time.now + seconds, partial(self._tick, self._chain))

    def _awake(self) -> None:
        """Catch up with the ticks that were left out, and go on with those that are not."""
        self._quiet = 0
        self._chain += 1
        self._threads.awake()
        self.service.tick()
        self._tick_in(TICK_S)
