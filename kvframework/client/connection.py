"""One engine process's connection to the server: handshake, arena mapping, reconnects, and the calls of transports.

The connection's own threads do the I/O. Calls here come from engine threads: `wire/client_deadlines.py` has the table
of how long each waits, and how long it goes on without that thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvframework.api.futures import Future, Promise, StreamHook
from kvframework.api.hasher import Buffer, HasherProvider, KeyHasher
from kvframework.api.requests import Message, RequestSpec
from kvframework.api.transport import (
    EngineLink,
    LoadOutcome,
    LoadPlan,
    LostKind,
    Registration,
    StoreOutcome,
    StorePlan,
    Transfer,
    error_code,
)
from kvframework.client.connecting.arena_mapping import MappedArena
from kvframework.client.connecting.curve import keys_for
from kvframework.client.replies import as_response, granted, mapped, settled
from kvframework.client.transfers import check_complete, check_held, check_ranges
from kvframework.config import default_endpoint
from kvframework.errors import (
    DeadlineExceeded,
    KVFrameworkError,
    ProtocolError,
    ServerGone,
    TransportMismatch,
    VersionMismatch,
)
from kvframework.logs.limit import LogLimit
from kvframework.messaging.client.connection import Connection
from kvframework.messaging.client.pending import Answer
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
R = TypeVar("R")

_NO_ARENA = memoryview(b"")
_HELD = LoadOutcome(True)
_PINS_LOST = LoadOutcome(False, "the pins on the objects lapsed while they were read")


class KVClient(EngineLink):
    """A client session. Thread-safe. Starts connecting at once, and reconnects by itself whenever the server has ended.

    `endpoint` None: $KVFRAMEWORK_ENDPOINT, then the default private endpoint of this user. `deadline_scale` makes
    deadlines longer or shorter, 0.1 to 100; None: $KVFRAMEWORK_DEADLINE_SCALE, else 1. `deadlines` is the resulting
    table. After a lookup's deadline, lookups fail at once until the server answers a PING; other calls do so once the
    server was silent for as long as they wait. `curve` are the key files for a tcp:// endpoint; None: those of
    $KVFRAMEWORK_CURVE_SECRET (this client's secret key) and $KVFRAMEWORK_CURVE_SERVER (the server's public key), if
    set. `requests` are specs of plugins' requests, which `request` then accepts beside the core's. Raises
    `EndpointError`, `ConfigFieldError` and `CurveKeyError`.
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
        """The plugins of this process; without `plugins` in the constructor they are discovered at the first use, which
        reads files."""
        with self._finding_plugins:
            if self._plugins is None:
                self._plugins = PluginRegistry()
            return self._plugins

    @property
    def boot_id(self) -> bytes | None:
        return self._connection.boot_id

    @property
    def chunk_size(self) -> int:
        """The server's configured chunk size, in tokens. Raises `ServerGone` if there never was a connection."""
        return self.hello.chunk_size

    @property
    def hasher(self) -> KeyHasher:
        """The hasher that the server named, loaded in this process. Raises `ServerGone` like `chunk_size`."""
        if self.hello and self._hasher:
            return self._hasher
        raise ServerGone("not connected yet")

    @property
    def hello(self) -> m.HelloReply:
        """The server's reply at the last handshake; waits for the first one, at most the connect timeout."""
        if self._reply is None and not self.wait_up(self._connect_timeout_s):
            self.raise_down()
        if self._reply is None:
            raise ServerGone("not connected yet")
        return self._reply

    def wait_up(self, timeout: float) -> bool:
        """Wait until calls are possible; False after `timeout` seconds."""
        return self._connection.wait_up(timeout)

    def raise_down(self) -> None:
        """Raise the reason why there is no connection: the server's refusal, or `ServerGone`."""
        error = self._connection.why_down
        if isinstance(error, KVFrameworkError) and not isinstance(error, ServerGone):
            raise error
        raise ServerGone(
            f"no server answers at {self.endpoint}",
            available=f"last try: {error.fact if isinstance(error, KVFrameworkError) else error}" if error else "",
            hint=getattr(error, "hint", "") or "start one with: kvframework serve",
        )

    def when_up(self, callback: Callable[[], None]) -> None:
        """Register a callback for every further handshake: it runs in the connection's supervisor thread, before other
        threads may make calls, in order to register again."""
        with self._lock:
            self._on_up.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Remove a callback of `when_up`."""
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
        """Send a request and wait for its answer; `timeout` in seconds, None: that of the table. Raises typed errors,
        `DeadlineExceeded` and `ServerGone`.

        `on_late` is called, in the connection's thread, with an answer that arrives after the wait has ended.
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
    ) -> Future[M]:
        """Send a request from an engine's thread, which waits `deadlines.engine_s` at most: the future is resolved by
        then, or later, by the request's own deadline. Never raises."""
        sent = self._begin(name, payload, urgent=urgent, on_late=_of_type(response, on_late))
        return mapped(sent, lambda answer: as_response(answer.payload, response))

    def ping(self, timeout: float | None = None) -> float:
        """Return the seconds that one round trip through the server's loop takes (NOOP). Raises as `request` does."""
        started = time.perf_counter()
        self.request("NOOP", m.Empty(), m.Empty, timeout=timeout)
        return time.perf_counter() - started

    def chunk_tokens(self, namespace: bytes) -> int:
        """Return the tokens of a chunk of a registered namespace, of this client or another. Blocking. Raises
        `RequestError` for a namespace that is not registered, and the errors of `request`."""
        return self.request("GET_CHUNK_SIZE", m.GetChunkSize(namespace), m.ChunkSize).chunk_size

    def reachable(self, request: str) -> bool:
        """Return whether `begin` would send this request: connected, and the server silent for less than its deadline.
        Never blocks."""
        return self._connection.reachable(self.deadlines.of(request))

    def close(self) -> None:
        """Close the liveness socket, which ends all that the server holds for this process. Idempotent."""
        self._connection.close()
        self._down()

    # EngineDrivenLink

    @property
    def maps_arena(self) -> bool:
        return self._arena is not None

    def prepare_store(self, transfer: Transfer) -> Future[StorePlan]:
        arena = self._arena
        if arena is None:
            return Future.failed(
                TransportMismatch("the server's arena is not mapped in this process", available="missing_chunks")
            )
        left_out = transfer.first_chunks
        payload = m.Prepare(transfer.key, transfer.registration.instance_id, left_out if any(left_out) else ())
        sent = self._begin("PREPARE_STORE", payload, on_late=_of_type(m.StorePlan, self._abort_late))

        def plan_of(answer: Answer) -> StorePlan:
            told = as_response(answer.payload, m.StorePlan)
            try:
                self._check_same(arena)
                check_ranges(transfer, told.ranges, arena.view.nbytes)
                check_held(transfer, told.ranges, told.outcome)
            except KVFrameworkError:
                self._abort_late(told)
                raise
            return StorePlan(
                arena.view,
                told.ranges,
                told.outcome,
                commit=partial(self._commit_store, told.lease, len(told.ranges), told.outcome),
                abort=partial(self._abort_store, told.lease),
            )

        return granted(sent, plan_of, StorePlan.abort)

    def prepare_load(self, transfer: Transfer) -> Future[LoadPlan]:
        arena = self._arena
        payload = m.Prepare(transfer.key, transfer.registration.instance_id)
        sent = self._begin("PREPARE_RETRIEVE", payload, on_late=_of_type(m.RetrievePlan, self._unpin_late))

        def plan_of(answer: Answer) -> LoadPlan:
            told = as_response(answer.payload, m.RetrievePlan)
            try:
                self._check_same(arena)
                if told.hit:
                    check_ranges(transfer, told.ranges, arena.view.nbytes if arena is not None else None)
                    check_complete(transfer, told.ranges)
            except KVFrameworkError:
                self._unpin_late(told)
                raise
            return LoadPlan(
                arena.view if arena is not None else _NO_ARENA,
                told.ranges if told.hit else (),
                reason=told.reason,
                commit=partial(self._commit_load, told.lease),
                abort=partial(self._unpin_late, told),
                receive=partial(self._receive_chunks, told),
            )

        return granted(sent, plan_of, LoadPlan.abort)

    def missing_chunks(self, transfer: Transfer) -> Future[list[int]]:
        payload = m.StoreCpuChunks(transfer.key, transfer.registration.instance_id)
        sent = self._begin("STORE_CPU_CHUNKS", payload)

        def missing(answer: Answer) -> list[int]:
            found = unpack_indices(as_response(answer.payload, m.ChunksStored).missing, where="missing")
            if found and max(found) >= transfer.objects:
                raise ProtocolError(f"the server lacks object {max(found)}", available=f"{transfer.objects} objects")
            return found

        return mapped(sent, missing)

    def store_chunks(
        self, transfer: Transfer, objects: Sequence[int], buffers: Sequence[Buffer]
    ) -> Future[StoreOutcome]:
        payload = m.StoreCpuChunks(transfer.key, transfer.registration.instance_id, pack_indices(objects))
        sent = self._bulk("STORE_CPU_CHUNKS", payload, buffers, sum(memoryview(buffer).nbytes for buffer in buffers))
        return mapped(sent, lambda answer: as_response(answer.payload, m.ChunksStored).outcome)

    # ServerDrivenLink

    def store(
        self, transfer: Transfer, *, event: bytes = b"", stream_hook: StreamHook | None = None
    ) -> Future[StoreOutcome]:
        return self._server_driven(
            "STORE", transfer, 0, event, stream_hook, outcome_of=partial(_stored, transfer), failed=transfer.failed
        )

    def load(
        self, transfer: Transfer, skip_tokens: int, *, event: bytes = b"", stream_hook: StreamHook | None = None
    ) -> Future[LoadOutcome]:
        return self._server_driven(
            "RETRIEVE",
            transfer,
            skip_tokens,
            event,
            stream_hook,
            outcome_of=lambda reply: LoadOutcome(reply.ok, reply.reason),
            failed=LoadOutcome.failed,
        )

    def gather_block(self, registration: Registration, blocks: Sequence[int], event: bytes) -> list[bytes]:
        payload = m.GatherBlock(registration.instance_id, pack_block_ids([[block] for block in blocks]), event)
        # Urgent, since a reconnect asks this too.
        return list(self.request("GATHER_BLOCK", payload, m.GatheredBlock, urgent=True).groups)

    # reports of adapters, and the mechanism behind the links

    def lost(self, kind: LostKind, code: str, nbytes: int = 0) -> None:
        """Count a lookup, load or store that failed without an answer, or with an error of this code: the server's
        status shows it. `nbytes` is its size. Never blocks."""
        if code == ServerGone.code and self._connection.state == "suspect":
            code = DeadlineExceeded.code  # the server is there, and does not answer
        self._connection.losses.add(kind, code, nbytes)

    def send(self, name: str, payload: Message) -> None:
        """Send a request without interest in its answer. Never blocks, never raises."""
        self._connection.request(name, payload, timeout=self.deadlines.of(name), urgent=True)

    def _begin(
        self,
        name: str,
        payload: Message,
        *,
        urgent: bool = False,
        on_late: Callable[[Message], None] | None = None,
    ) -> Future[Answer]:
        deadlines = self.deadlines
        return self._connection.begin(
            name, payload, timeout=deadlines.of(name), turn=deadlines.engine_s, urgent=urgent, on_late=on_late
        )

    def _bulk(self, name: str, payload: Message, buffers: Sequence[Buffer], nbytes: int) -> Future[Answer]:
        return self._connection.bulk_request(name, payload, buffers, timeout=self.deadlines.of_bulk(nbytes))

    def _check_same(self, arena: MappedArena | None) -> None:
        """Raise `ServerGone` unless the mapped arena is still `arena`: ranges mean nothing in another server's
        memory."""
        if self._arena is not arena:
            raise ServerGone("the server was restarted in between")

    def _commit_store(self, lease: str, objects: int, others: StoreOutcome) -> Future[StoreOutcome]:
        def failed(error: BaseException) -> StoreOutcome:
            # After the COMMIT: nothing stays reserved, whatever its outcome.
            self._abort_store(lease)
            if isinstance(error, DeadlineExceeded):
                return others + StoreOutcome(unknown=objects, error=error.code)
            return others + StoreOutcome(dropped=objects, error=error_code(error))

        # Urgent: a doubt about the server must not leave the range reserved until this process ends.
        sent = self._begin("COMMIT_STORE", m.LeaseRef(lease), urgent=True)
        return settled(sent, lambda answer: others + as_response(answer.payload, m.Committed).outcome, failed)

    def _abort_store(self, lease: str) -> None:
        if lease:
            self.send("ABORT", m.LeaseRef(lease))

    def _abort_late(self, told: m.StorePlan) -> None:
        self._abort_store(told.lease)

    def _commit_load(self, lease: str) -> Future[LoadOutcome]:
        sent = self._begin("COMMIT_RETRIEVE", m.LeaseRef(lease), urgent=True)
        return settled(
            sent,
            lambda answer: _HELD if as_response(answer.payload, m.RetrieveCommitted).held else _PINS_LOST,
            LoadOutcome.failed,
        )

    def _unpin_late(self, told: m.RetrievePlan) -> None:
        if told.lease:
            self.send("COMMIT_RETRIEVE", m.LeaseRef(told.lease))

    def _receive_chunks(self, told: m.RetrievePlan, positions: Sequence[int]) -> Future[Sequence[memoryview]]:
        payload = m.RetrieveCpuChunks(told.lease, pack_indices(positions))
        lengths = [told.ranges[at].length for at in positions]
        sent = self._bulk("RETRIEVE_CPU_CHUNKS", payload, (), sum(lengths))

        def received(answer: Answer) -> Sequence[memoryview]:
            if not as_response(answer.payload, m.ChunksSent).held:
                return ()
            if [buffer.nbytes for buffer in answer.buffers] != lengths:
                raise ProtocolError("the server sent buffers of other sizes than were asked for")
            return answer.buffers

        return mapped(sent, received)

    def _server_driven(
        self,
        name: str,
        transfer: Transfer,
        skip_tokens: int,
        event: bytes,
        stream_hook: StreamHook | None,
        *,
        outcome_of: Callable[[m.TransferReply], R],
        failed: Callable[[BaseException], R],
    ) -> Future[R]:
        packed = pack_block_ids(transfer.block_ids)
        payload = m.TransferRequest(transfer.key, transfer.registration.instance_id, packed, event, skip_tokens)
        deadlines = self.deadlines
        silence_s = deadlines.store_s if name == "STORE" else deadlines.load_s
        sent = self._connection.request(name, payload, timeout=deadlines.of(name), silence_s=silence_s)
        future: Promise[R] = Promise(sent.cancel, stream_hook=stream_hook)

        def answered(reply: Future[Answer]) -> None:
            error = reply.exception()
            if error is None:
                try:
                    result = outcome_of(as_response(reply.result(0).payload, m.TransferReply))
                except KVFrameworkError as failure:
                    result = failed(failure)
                future.set_result(result)
                return
            log.warning("%s of request %s failed: %s", name, transfer.request_id, error)
            result = failed(error)
            if isinstance(error, DeadlineExceeded):
                self._when_untouched(sent, lambda: future.set_result(result))
                # Last, since it may raise an error of the device's driver.
                future.expire_holds()
            else:
                future.set_result(result)

        sent.add_done_callback(answered)
        return future

    def _when_untouched(self, sent: Future[Answer], then: Callable[[], object]) -> None:
        """After a deadline the server may still touch the blocks: cancel the request, and call `then` once the server
        no longer touches them, or has ended. Runs in the connection's I/O thread."""

        def answered(cancel: Future[Answer]) -> None:
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
            # A remaining mapping would keep this session alive on the server.
            self._arena = None
            raise

    def _mapped(self, arena_fd: int) -> MappedArena:
        try:
            alive_fd = self._connection.liveness_fd()
        except OSError:
            os.close(arena_fd)
            raise
        return MappedArena(arena_fd, alive_fd)

    def _down(self) -> None:
        # A copy in progress still holds the view; the mapping ends with the last one.
        self._arena = None

    def _check(self, reply: m.HelloReply) -> None:
        """Raise unless another server at the same place cuts and hashes as the first did: the engine's own state
        depends on it."""
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


def _stored(transfer: Transfer, reply: m.TransferReply) -> StoreOutcome:
    if reply.ok or not reply.outcome.ok:
        return reply.outcome
    return StoreOutcome(dropped=transfer.objects)


def _of_type(response: type[M], on_late: Callable[[M], None] | None) -> Callable[[Message], None] | None:
    """Return `on_late` restricted to answers of the right type."""
    if on_late is None:
        return None

    def late(reply: Message) -> None:
        if isinstance(reply, response):
            on_late(reply)

    return late
