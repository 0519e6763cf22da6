"""One engine process's session with the server: handshake, arena mapping, reconnects, and requests; those of transports
are in `kv_client.py`. The connection's own threads do the I/O, and requests come from engine threads: the table in
`wire/protocol.py` says how long those wait, and how long a request goes on without them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvframework.api.futures import Future, Promise
from kvframework.api.hasher import KeyHasher
from kvframework.api.plugin import Message
from kvframework.api.requests import RequestSpec
from kvframework.api.transport import LostKind
from kvframework.client.arena_mapping import MappedArena
from kvframework.config.endpoint import default_endpoint
from kvframework.errors import Cancelled, DeadlineExceeded, KVFrameworkError, ServerGone, VersionMismatch
from kvframework.messaging.client.connection import Connection
from kvframework.messaging.client.link import Answer, OnLate
from kvframework.messaging.curve import CurveKeys, keys_for
from kvframework.registry.registry import PluginRegistry
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS, SALTED_TOKEN_IDS, SINCE_0_3, TOKEN_IDS, deadlines_for, offer

ENDPOINT_VARIABLE = "KVFRAMEWORK_ENDPOINT"
_START_HINT = (
    "start a server with: kvframework serve; if a server runs, compare its user and XDG_RUNTIME_DIR with the engine's, "
    "or set the same endpoint for both"
)


M = TypeVar("M", bound=Message)
R = TypeVar("R")
S = TypeVar("S", bound="ServerSession")


def as_response(reply: Message, response: type[M]) -> M:
    """Return the response in an answer. Raises `ServerGone` for an answer of another type."""
    if not isinstance(reply, response):
        raise ServerGone(f"the server answered with {type(reply).__name__}, expected {response.__name__}")
    return reply


def only(response: type[M], on_late: Callable[[M], None] | None) -> Callable[[Message], None] | None:
    """Return `on_late` restricted to answers of the right type."""
    if on_late is None:
        return None
    return lambda reply: on_late(reply) if isinstance(reply, response) else None


def mapped(
    sent: Future[Answer],
    result_of: Callable[[Answer], R],
    *,
    failed: Callable[[BaseException], R] | None = None,
    release: Callable[[R], object] | None = None,
) -> Future[R]:
    """Return a future of `result_of` the answer. It fails with any error, unless `failed` makes a result of that. With
    `release` the answer is a grant of the server: a cancelled future fails at once, the request itself goes on, and
    what it grants is released when it arrives. Runs in the thread that resolves `sent`."""
    future: Promise[R]

    def answered(reply: Future[Answer]) -> None:
        error = reply.exception()
        if error is None:
            try:
                result = result_of(reply.result(0))
            except Exception as failure:  # noqa: BLE001 - a future without a result would never end
                # Its frames refer to the future, and so to themselves: a cycle that keeps tensors and the arena.
                error = failure.with_traceback(None)
            else:
                if not future.set_result(result) and release is not None:
                    release(result)
                return
        if failed is not None:
            future.set_result(failed(error))
        else:
            future.set_exception(error)

    def cancel() -> None:
        future.set_exception(Cancelled("the request was cancelled"))

    future = Promise(sent.cancel if release is None else cancel)
    sent.add_done_callback(answered)
    return future


class ServerSession:
    """`KVClient` without the calls of transports."""

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
        self._plugins, self._connect_timeout_s = plugins, connect_timeout_s
        self._reply: m.HelloReply | None = None
        self._hasher: KeyHasher | None = None
        self._arena: MappedArena | None = None
        self._on_up: list[Callable[[], None]] = []
        self._until_down: set[Future[Any]] = set()
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

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def usable(self) -> bool:
        """Whether the client is connected and the server answers. Never blocks."""
        return self._connection.state == "up"

    def wants_tokens(self, cache_salt: str = "") -> bool:
        """Return whether the server wants token ids of prompts with this salt, see `RequestHashes`. Never blocks."""
        return self.has(SALTED_TOKEN_IDS if cache_salt else TOKEN_IDS)

    def has(self, feature: str) -> bool:
        """Return whether the server named a feature in its HELLO, see `wire/protocol.py`. Never blocks."""
        return self._reply is not None and feature in self._reply.features

    @property
    def maps_arena(self) -> bool:
        """Whether this process maps the server's arena now; over TCP it never does."""
        return self._arena is not None

    @property
    def arena(self) -> MappedArena | None:
        """The server's arena as this process maps it, or None. `view` has the arena's bytes. Bytes that were read are
        whole only if `is_served` is true afterwards: the session for which the arena was mapped still lasts."""
        return self._arena

    @property
    def plugins(self) -> PluginRegistry:
        """The plugins of this process. Without those of the constructor, the first use finds them; that blocks."""
        with self._finding_plugins:
            if self._plugins is None:
                self._plugins = PluginRegistry()
            return self._plugins

    @property
    def boot_id(self) -> bytes | None:
        """The random id of the server's start; None before the first connection."""
        return self._connection.boot_id

    @property
    def chunk_size(self) -> int:
        """The server's configured chunk size, in tokens. Blocks and raises as `hello` does."""
        return self.hello.chunk_size

    @property
    def hasher(self) -> KeyHasher:
        """The hasher that the server named, loaded in this process. Blocks and raises as `hello` does."""
        if self.hello and self._hasher:
            return self._hasher
        raise ServerGone("the client has not connected to the server yet")

    @property
    def hello(self) -> m.HelloReply:
        """The server's reply in the last handshake. Blocks until the first handshake, for the connect timeout at most;
        raises `ServerGone`, or the error by which the server refused this client."""
        if not self._connection.was_up and not self.wait_up(self._connect_timeout_s):
            self.raise_down()
        if self._reply is None:
            raise ServerGone("the client has not connected to the server yet")
        return self._reply

    def wait_up(self, timeout: float) -> bool:
        """Wait until the client is connected, for `timeout` seconds at most, and return whether it is."""
        return self._connection.wait_up(timeout)

    def raise_down(self) -> None:
        """Raise the error by which the server refused this client, else `ServerGone`. Never blocks."""
        error = self._connection.last_error
        if isinstance(error, KVFrameworkError) and not isinstance(error, ServerGone):
            raise error
        fact = f"no server answers at {self.endpoint}"
        available = f"last try: {error.fact if isinstance(error, KVFrameworkError) else error}" if error else ""
        raise ServerGone(fact, available=available, hint=getattr(error, "hint", "") or _START_HINT)

    def when_up(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each further handshake, in the connection's thread, before other calls are sent."""
        self._on_up.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Remove a callback of `when_up`, if it is there. Never blocks."""
        with contextlib.suppress(ValueError):
            self._on_up.remove(callback)

    def cancel_when_down(self, work: Future[Any]) -> None:
        """Cancel `work` when this connection ends. Never blocks."""
        self._until_down.add(work)
        work.add_done_callback(self._until_down.discard)
        if self._connection.state == "down" and self._arena is None:  # not while it comes up
            work.cancel()

    def map_ahead(self) -> None:
        """See `EngineDrivenLink`."""
        if (arena := self._arena) is not None:
            arena.map_ahead()

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
        """Send a request and return the answer. Blocks for `timeout` seconds at most, None: as `deadlines` says.
        `on_late` gets an answer that arrives later, in the connection's thread. Raises the server's error,
        `DeadlineExceeded` or `ServerGone`."""
        wait = self.deadlines.of(name) if timeout is None else timeout
        late = only(response, on_late)
        return as_response(self._connection.ask(name, payload, timeout=wait, urgent=urgent, on_late=late), response)

    def begin(
        self, name: str, payload: Message, response: type[M], *, urgent: bool = False, waits: bool = True
    ) -> Future[M]:
        """Send a request and return the future of its answer, which is resolved by the request's deadline. Blocks for
        `deadlines.engine_s` seconds at most, without `waits` not at all. Never raises."""
        sent = self._begin(name, payload, urgent=urgent, waits=waits)
        return mapped(sent, lambda answer: as_response(answer.payload, response))

    def reachable(self, request: str) -> bool:
        """Return whether `begin` would send this request: the server is connected and answers. Never blocks."""
        return self._connection.reachable(self.deadlines.of(request))

    def lost(self, kind: LostKind, code: str, nbytes: int = 0) -> None:
        """Count a failed lookup, load or store of `nbytes` bytes, by its error code, for the server's status."""
        if code == ServerGone.code and self._connection.state == "suspect":
            code = DeadlineExceeded.code  # the server is there, and does not answer
        self._connection.reports.lost(kind, code, nbytes)

    def send(self, name: str, payload: Message) -> None:
        """Send a request and ignore the answer. Never blocks, never raises."""
        # Of END_SESSION it must be known when it was sent.
        if name in ("ABORT", "COMMIT_RETRIEVE") and self.has(SINCE_0_3) and self._connection.post(name, payload):
            return
        self._connection.begin(name, payload, timeout=self.deadlines.of(name), urgent=True)

    def free_soon(self, *tickets: str) -> None:
        """Free tickets and leases of grants, by the next LOOKUP or PING. Never blocks, never raises."""
        self._connection.reports.free(tickets)

    def take_freed(self) -> tuple[str, ...]:
        """Return the tickets that a LOOKUP should free: its caller sends them, or returns them by `free_soon`."""
        return self._connection.reports.take_freed()

    def _begin(
        self, name: str, payload: Message, *, urgent: bool = False, on_late: OnLate | None = None, waits: bool = True
    ) -> Future[Answer]:
        wait, turn = self.deadlines.of(name), self.deadlines.engine_s if waits else 0.0
        return self._connection.begin(
            name, payload, timeout=wait, turn=turn, urgent=urgent, silence_s=wait, on_late=on_late
        )

    def ping(self, timeout: float | None = None) -> float:
        """Return the seconds of one round trip through the server's loop (NOOP). Blocks and raises as `request`."""
        started = time.perf_counter()
        self.request("NOOP", m.Empty(), m.Empty, timeout=timeout)
        return time.perf_counter() - started

    def chunk_tokens(self, namespace: bytes) -> int:
        """Return the number of tokens in a chunk of a namespace that any client has registered. Blocks and raises as
        `request`, and `RequestError` for another namespace."""
        return self.request("GET_CHUNK_SIZE", m.GetChunkSize(namespace), m.ChunkSize).chunk_size

    def close(self) -> None:
        """End the session: the server releases all pins and leases of this process. Idempotent, never raises."""
        self._connection.close()
        self._down()

    # the connection's supervisor thread

    def _up(self, reply: m.HelloReply, arena_fd: int | None) -> None:
        self._arena = None if arena_fd is None else self._mapped(arena_fd)
        try:
            self._check(reply)
            if self._hasher is None:
                self._hasher = self._load_hasher(reply)
            self._reply = reply
            for callback in list(self._on_up):
                callback()
        except BaseException:
            # A remaining mapping would keep this session alive on the server.
            self._arena = None
            raise

    def _mapped(self, arena_fd: int) -> MappedArena:
        try:
            alive_fd = self._connection.liveness_fd()
        except BaseException:
            os.close(arena_fd)
            raise
        return MappedArena(arena_fd, alive_fd)

    def _down(self) -> None:
        # A copy in progress still holds the view; the mapping ends with the last one.
        self._arena = None
        for work in list(self._until_down):
            work.cancel()

    def _check(self, reply: m.HelloReply) -> None:
        """Raise unless another server at the same place cuts, hashes and names as the first did: the engine's own state
        depends on it, and its scheduler, perhaps another process, asks for the names that its workers had at first."""
        before, now = _naming(self._reply or reply), _naming(reply)
        if now != before:
            raise VersionMismatch(
                f"the restarted server has {', '.join(each for each in now if each not in before)}",
                available=f"{', '.join(each for each in before if each not in now)} as before",
                hint="restart the engine, or the server with its former configuration",
            )

    def _load_hasher(self, reply: m.HelloReply) -> KeyHasher:
        hasher: KeyHasher = self.plugins.create("hasher", reply.hasher, {}, where="the server's hasher")
        if hasher.fingerprint != reply.hasher_fingerprint:
            hint, available = "install the same hasher for the engine and the server", f"{hasher.fingerprint} here"
            raise VersionMismatch(
                f"the server uses the hasher {reply.hasher_fingerprint}", available=available, hint=hint
            )
        return hasher


def _naming(reply: m.HelloReply) -> tuple[str, ...]:
    """Return the settings on which all names of a server's objects depend."""
    return (
        f"chunk size {reply.chunk_size}",
        f"hasher {reply.hasher_fingerprint}",
        f"tp_lcm {reply.tp_lcm}",
        f"pp_lcm {reply.pp_lcm}",
    )
