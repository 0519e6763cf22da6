"""Owns one engine process's connection to the server: handshake, arena mapping, reconnects, and the calls of
transports.

The connection's own threads do the I/O. Calls here come from engine threads: how long each waits, and goes on behind
that thread, is the table in `wire/client_deadlines.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvframework.api import (
    BlockIds,
    Buffer,
    CacheKey,
    EngineLink,
    HasherProvider,
    KeyHasher,
    LostKind,
    Message,
    MessagingFuture,
    RequestSpec,
    RetrievePlan,
    StoreOutcome,
    StorePlan,
)
from kvframework.client.arena import MappedArena
from kvframework.client.curve import keys_for
from kvframework.client.replies import as_response, mapped
from kvframework.config import default_endpoint
from kvframework.errors import DeadlineExceeded, KVFrameworkError, ServerGone, VersionMismatch
from kvframework.logs.limit import LogLimit
from kvframework.messaging.client.connection import Connection
from kvframework.messaging.curve import CurveKeys
from kvframework.registry.registry import PluginRegistry
from kvframework.wire import messages as m
from kvframework.wire.client_deadlines import deadlines_for
from kvframework.wire.handshake import offer
from kvframework.wire.indices import pack_block_ids, pack_indices, unpack_indices
from kvframework.wire.table import REQUESTS

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

ENDPOINT_VARIABLE = "KVFRAMEWORK_ENDPOINT"

M = TypeVar("M", bound=Message)


class KVClient(EngineLink):
    """A client session. Thread-safe. Starts to connect at once, and again by itself whenever the server has ended.

    `endpoint` None: $KVFRAMEWORK_ENDPOINT, then the default private endpoint of this user. `deadline_scale` makes
    deadlines longer or shorter, 0.1 to 100; None: $KVFRAMEWORK_DEADLINE_SCALE, else 1. `deadlines` is the table then.
    After a lookup's deadline lookups fail at once until the server answers a PING, other calls once it was silent for
    as long as they wait.
    `curve` are the key files for a tcp:// endpoint; None: those of $KVFRAMEWORK_CURVE_SECRET (this client's secret key)
    and $KVFRAMEWORK_CURVE_SERVER (the server's public key), if set. `requests` are those of plugins, which `request`
    then knows beside the core's. Raises `EndpointError`, `ConfigFieldError` and `CurveKeyError`.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        name: str = "engine",
        connect_timeout_s: float = 5.0,
        deadline_scale: float | None = None,
        plugins: PluginRegistry | None = None,
        curve: CurveKeys | None = None,
        requests: Sequence[RequestSpec] = (),
    ) -> None:
        self.endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or default_endpoint()
        self.deadlines = deadlines_for(self.endpoint, deadline_scale)
        self._plugins = plugins
        self._connect_timeout_s = connect_timeout_s
        self._reply: m.HelloReply | None = None
        self._hasher: KeyHasher | None = None
        self._arena: MappedArena | None = None
        self._on_up: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._finding_plugins = threading.Lock()
        self._connection = Connection(
            self.endpoint,
            offer(name, os.getpid()),
            table={spec.name: spec for spec in requests} | REQUESTS,
            on_up=self._up,
            on_down=self._down,
            deadlines=self.deadlines,
            keys=keys_for(self.endpoint, curve),
        )
        self._connection.start()

    def __enter__(self) -> KVClient:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def usable(self) -> bool:
        """Whether calls are worth making now: connected, set up, and not in doubt. Never blocks."""
        return self._connection.state == "up"

    @property
    def plugins(self) -> PluginRegistry:
        """Those of this process; without `plugins` they are looked for at the first use, which reads files."""
        with self._finding_plugins:
            if self._plugins is None:
                self._plugins = PluginRegistry()
            return self._plugins

    @property
    def boot_id(self) -> bytes | None:
        return self._connection.boot_id

    @property
    def chunk_size(self) -> int:
        """The server's configured chunk size. Raises `ServerGone` if there never was a connection."""
        return self.hello.chunk_size

    @property
    def hasher(self) -> KeyHasher:
        """The hasher that the server named, loaded here. Raises `ServerGone` like `chunk_size`."""
        if self.hello and self._hasher:
            return self._hasher
        raise ServerGone("not connected yet")

    @property
    def hello(self) -> m.HelloReply:
        """What the server said at the last handshake; waits for the first one, at most the connect timeout."""
        if self._reply is None and not self.wait_up(self._connect_timeout_s):
            self.raise_down()
        if self._reply is None:
            raise ServerGone("not connected yet")
        return self._reply

    def wait_up(self, timeout: float) -> bool:
        """Waits until calls may be made; False after `timeout` seconds."""
        return self._connection.wait_up(timeout)

    def raise_down(self) -> None:
        """Raises why there is no connection: the server's refusal, or `ServerGone`."""
        error = self._connection.why_down
        if isinstance(error, KVFrameworkError) and not isinstance(error, ServerGone):
            raise error
        raise ServerGone(
            f"no server answers at {self.endpoint}",
            available=f"last try: {error.fact if isinstance(error, KVFrameworkError) else error}" if error else "",
            hint=getattr(error, "hint", "") or "start one with: kvframework serve",
        )

    def when_up(self, callback: Callable[[], None]) -> None:
        """Calls back after every further handshake, in the connection's supervisor thread, before calls may be made by
        others: to register again."""
        with self._lock:
            self._on_up.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Ends `when_up` for a callback."""
        with self._lock, contextlib.suppress(ValueError):
            self._on_up.remove(callback)

    def request(
        self,
        name: str,
        payload: Message,
        response: type[M],
        *,
        timeout: float | None = None,
        urgent: bool = False,
        on_late: Callable[[M], None] | None = None,
    ) -> M:
        """One request, waiting for its answer; `timeout` None: as the table says. Raises typed errors,
        `DeadlineExceeded` and `ServerGone`.

        `on_late` is called, in the connection's thread, with an answer that comes after the wait was given up.
        """
        wait = self.deadlines.of(name) if timeout is None else timeout
        answer = self._connection.ask(name, payload, timeout=wait, urgent=urgent, on_late=_of_type(response, on_late))
        return as_response(answer, response)

    def begin(
        self,
        name: str,
        payload: Message,
        response: type[M],
        *,
        urgent: bool = False,
        on_late: Callable[[M], None] | None = None,
    ) -> MessagingFuture[M]:
        """`request` for an engine's thread, which waits `deadlines.engine_s` at most: the future is resolved by then,
        or later, by the request's own deadline. Never raises."""
        sent = self._begin(name, payload, urgent=urgent, on_late=_of_type(response, on_late))
        return mapped(sent, lambda reply, _: as_response(reply, response))

    def ping(self, timeout: float | None = None) -> float:
        """The seconds that one round trip through the server's loop takes (NOOP). Raises as `request` does."""
        started = time.perf_counter()
        self.request("NOOP", m.Empty(), m.Empty, timeout=timeout)
        return time.perf_counter() - started

    def chunk_tokens(self, namespace: bytes) -> int:
        """The tokens of a chunk of a namespace that is registered, by this client or another. Blocking. Raises
        `RequestError` for a namespace that is not, and what `request` does."""
        return self.request("GET_CHUNK_SIZE", m.GetChunkSize(namespace), m.ChunkSize).chunk_size

    def reachable(self, request: str) -> bool:
        """Whether `begin` would send this request: connected, and the server silent for less than its deadline. Never
        blocks."""
        return self._connection.reachable(self.deadlines.of(request))

    def close(self) -> None:
        """Says goodbye by closing the liveness socket: all that this process holds ends. Idempotent."""
        self._connection.close()
        self._down()

    # EngineLink

    def arena(self) -> memoryview | None:
        arena = self._arena
        return arena.view if arena else None

    def prepare_store(
        self, key: CacheKey, instance_id: int, first_chunks: Sequence[int] = ()
    ) -> MessagingFuture[StorePlan]:
        payload = m.Prepare(key, instance_id, tuple(first_chunks))
        return self.begin(
            "PREPARE_STORE", payload, StorePlan, on_late=lambda plan: self._give_back("ABORT", plan.lease)
        )

    def commit_store(self, lease: str) -> MessagingFuture[StoreOutcome]:
        # Urgent: a doubt about the server must not leave the range reserved until this process ends.
        sent = self._begin("COMMIT_STORE", m.LeaseRef(lease), urgent=True)
        return mapped(sent, lambda reply, _: as_response(reply, m.Committed).outcome)

    def abort_store(self, lease: str) -> None:
        # Nobody has anything of the answer.
        self.begin("ABORT", m.LeaseRef(lease), m.Aborted, urgent=True)

    def prepare_retrieve(self, key: CacheKey, instance_id: int) -> MessagingFuture[RetrievePlan]:
        payload = m.Prepare(key, instance_id)
        return self.begin(
            "PREPARE_RETRIEVE",
            payload,
            RetrievePlan,
            on_late=lambda plan: self._give_back("COMMIT_RETRIEVE", plan.lease),
        )

    def commit_retrieve(self, lease: str) -> MessagingFuture[bool]:
        sent = self._begin("COMMIT_RETRIEVE", m.LeaseRef(lease), urgent=True)
        return mapped(sent, lambda reply, _: as_response(reply, m.RetrieveCommitted).held)

    def lost(self, kind: LostKind, error: BaseException, nbytes: int = 0) -> None:
        code = error.code if isinstance(error, KVFrameworkError) else "error"
        if isinstance(error, ServerGone) and self._connection.state == "suspect":
            code = DeadlineExceeded.code  # it is there, and does not answer
        self._connection.losses.add(kind, code, nbytes)

    def send(self, name: str, payload: Message) -> None:
        """One request whose answer nobody waits for. Never blocks, never raises."""
        self._connection.request(name, payload, timeout=self.deadlines.of(name), urgent=True)

    def _begin(
        self,
        name: str,
        payload: Message,
        *,
        urgent: bool = False,
        on_late: Callable[[Message], None] | None = None,
    ) -> MessagingFuture[Message]:
        deadlines = self.deadlines
        return self._connection.begin(
            name, payload, timeout=deadlines.of(name), turn=deadlines.engine_s, urgent=urgent, on_late=on_late
        )

    def _give_back(self, name: str, lease: str) -> None:
        """Ends a lease that came too late for whoever had asked for it."""
        if lease:
            self.send(name, m.LeaseRef(lease))

    def missing_chunks(self, key: CacheKey, instance_id: int) -> MessagingFuture[list[int]]:
        sent = self._begin("STORE_CPU_CHUNKS", m.StoreCpuChunks(key, instance_id))
        return mapped(
            sent, lambda reply, _: unpack_indices(as_response(reply, m.ChunksStored).missing, where="missing")
        )

    def store_chunks(
        self, key: CacheKey, instance_id: int, objects: Sequence[int], buffers: Sequence[Buffer]
    ) -> MessagingFuture[StoreOutcome]:
        payload = m.StoreCpuChunks(key, instance_id, pack_indices(objects))
        sent = self._bulk("STORE_CPU_CHUNKS", payload, buffers, sum(memoryview(buffer).nbytes for buffer in buffers))
        return mapped(sent, lambda reply, _: as_response(reply, m.ChunksStored).outcome)

    def retrieve_chunks(self, plan: RetrievePlan, positions: Sequence[int]) -> MessagingFuture[Sequence[memoryview]]:
        payload = m.RetrieveCpuChunks(plan.lease, pack_indices(positions))
        sent = self._bulk("RETRIEVE_CPU_CHUNKS", payload, (), sum(plan.ranges[at].length for at in positions))
        return mapped(sent, lambda reply, buffers: buffers if as_response(reply, m.ChunksSent).held else ())

    def _bulk(self, name: str, payload: Message, buffers: Sequence[Buffer], nbytes: int) -> MessagingFuture[Message]:
        return self._connection.bulk_request(name, payload, buffers, timeout=self.deadlines.of_bulk(nbytes))

    def gather_block(self, instance_id: int, blocks: Sequence[int], event: bytes) -> list[bytes]:
        payload = m.GatherBlock(instance_id, pack_block_ids([[block] for block in blocks]), event)
        # Urgent: also asked from within a reconnect.
        return list(self.request("GATHER_BLOCK", payload, m.GatheredBlock, urgent=True).groups)

    def submit(
        self, kind: str, key: CacheKey, instance_id: int, block_ids: BlockIds, event: bytes, skip_first_n_tokens: int
    ) -> MessagingFuture[bool]:
        payload = m.TransferRequest(key, instance_id, pack_block_ids(block_ids), event, skip_first_n_tokens)
        deadlines = self.deadlines
        silence_s = deadlines.store_s if kind == "STORE" else deadlines.load_s
        sent = self._connection.request(kind, payload, timeout=deadlines.of(kind), silence_s=silence_s)
        future: MessagingFuture[bool] = MessagingFuture(sent.cancel)
        chunks = (key.end - key.start) // self.chunk_size
        dropped = StoreOutcome(dropped=chunks * len(block_ids)) if kind == "STORE" else None

        def answered(reply: MessagingFuture[Message]) -> None:
            error = reply.exception()
            if error is not None:
                self.lost("stores" if kind == "STORE" else "loads", error)
                log.warning("%s of request %s failed: %s", kind, key.request_id, error)
                if isinstance(error, DeadlineExceeded):
                    self._when_untouched(sent, lambda: future.set_result(False, dropped, cause=error))
                    # Last, since it may raise what a device's driver does.
                    future.overdue()
                else:
                    future.set_result(False, dropped, cause=error)
                return
            result = reply.result(0)
            ok = isinstance(result, m.TransferReply) and result.ok
            outcome = result.outcome if isinstance(result, m.TransferReply) else dropped
            future.set_result(ok, outcome if kind == "STORE" else None)

        sent.add_done_callback(answered)
        return future

    def _when_untouched(self, sent: MessagingFuture[Message], then: Callable[[], object]) -> None:
        """Nobody answered in time, but the server may still touch the blocks: cancels, and calls `then` once it does
        not, or is gone. In the connection's I/O thread."""

        def answered(cancel: MessagingFuture[Message]) -> None:
            if isinstance(cancel.exception(), DeadlineExceeded):
                self._when_untouched(sent, then)
            else:
                then()

        self._connection.cancel(sent).add_done_callback(answered)

    # the connection's supervisor thread

    def _up(self, reply: m.HelloReply, arena_fd: int | None) -> None:
        self._arena = self._mapped(arena_fd) if arena_fd is not None else None
        try:
            self._check(reply)
            if self._hasher is None:
                self._hasher = self._load_hasher(reply)
            self._reply = reply
            with self._lock:
                callbacks = list(self._on_up)
            for callback in callbacks:
                callback()
        except BaseException:
            # A mapping left standing would keep this session alive on the server.
            self._arena = None
            raise

    def _mapped(self, arena_fd: int) -> MappedArena:
        try:
            alive_fd = self._connection.hold()
        except OSError:
            os.close(arena_fd)
            raise
        return MappedArena(arena_fd, alive_fd)

    def _down(self) -> None:
        # Whoever copies at this moment still holds the view; the mapping goes with the last of them.
        self._arena = None

    def _check(self, reply: m.HelloReply) -> None:
        """Another server at the same place must cut and hash as the first did: what engines hold depends on it."""
        before = self._reply
        if before and (before.chunk_size, before.hasher_fingerprint) != (reply.chunk_size, reply.hasher_fingerprint):
            raise VersionMismatch(
                f"the new server has chunk size {reply.chunk_size} and hasher {reply.hasher_fingerprint}",
                available=f"{before.chunk_size} and {before.hasher_fingerprint} as before",
                hint="restart the engine, or the server with its former configuration",
            )

    def _load_hasher(self, reply: m.HelloReply) -> KeyHasher:
        provider = self.plugins.resolve("hasher", reply.hasher, where="the server's hasher")
        if not isinstance(provider, HasherProvider):
            raise VersionMismatch(f"{reply.hasher!r} is no hasher here")
        hasher: KeyHasher = provider.create(self.plugins.options(provider, {}, where="the server's hasher"))
        if hasher.fingerprint != reply.hasher_fingerprint:
            raise VersionMismatch(
                f"the server hashes with {reply.hasher_fingerprint}",
                available=f"{hasher.fingerprint} here",
                hint="install the same hasher beside the engine and the server",
            )
        return hasher


def _of_type(response: type[M], on_late: Callable[[M], None] | None) -> Callable[[Message], None] | None:
    """`on_late` for answers of the right type only."""
    if on_late is None:
        return None

    def late(reply: Message) -> None:
        if isinstance(reply, response):
            on_late(reply)

    return late
