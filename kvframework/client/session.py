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
from kvframework.wire.protocol import REQUESTS, SALTED_TOKEN_IDS, TOKEN_IDS, deadlines_for, offer

ENDPOINT_VARIABLE = "KVFRAMEWORK_ENDPOINT"
_START_HINT = (
    "start one with: kvframework serve; where it runs already, compare the user and XDG_RUNTIME_DIR of both sides, or "
    "name the endpoint on both"
)


M = TypeVar("M", bound=Message)
R = TypeVar("R")
S = TypeVar("S", bound="ServerSession")


def as_response(reply: Message, response: type[M]) -> M:
    """Return the response in an answer. Raises `ServerGone` for an answer of another type."""
    if not isinstance(reply, response):
        raise ServerGone(f"answered with {type(reply).__name__}, not {response.__name__}")
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
                # Its frames refer to the future, and so to themselves: the cycle would keep the engine's tensors, and
                # the arena mapped, until it was collected.
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
        self._maps_ahead = False
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
        """Whether calls are worth making now: connected, set up, and not in doubt."""
        return self._connection.state == "up"

    def wants_tokens(self, cache_salt: str = "") -> bool:
        """Return whether the server wants the tokens of prompts with this salt, for routers, see `RequestHashes`."""
        return self.has(SALTED_TOKEN_IDS if cache_salt else TOKEN_IDS)

    def has(self, feature: str) -> bool:
        """Return whether the server has a feature of HELLO, see `wire/protocol.py`."""
        return self._reply is not None and feature in self._reply.features

    @property
    def maps_arena(self) -> bool:
        """Whether the server's arena is mapped in this process now; it cannot be over TCP."""
        return self._arena is not None

    @property
    def arena(self) -> MappedArena | None:
        """The server's arena as it is mapped in this process now. `view` is its bytes, and `is_served` whether the
        session for which it was mapped goes on: what was read before is whole only if it does."""
        return self._arena

    @property
    def plugins(self) -> PluginRegistry:
        """The plugins of this process; if the constructor got none, found at the first use, which reads files."""
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
        if not self._connection.was_up and not self.wait_up(self._connect_timeout_s):
            self.raise_down()
        if self._reply is None:
            raise ServerGone("not connected yet")
        return self._reply

    def wait_up(self, timeout: float) -> bool:
        """Wait until calls are possible; False after `timeout` seconds."""
        return self._connection.wait_up(timeout)

    def raise_down(self) -> None:
        """Raise the reason why there is no connection: the server's refusal, or `ServerGone`."""
        error = self._connection.last_error
        if isinstance(error, KVFrameworkError) and not isinstance(error, ServerGone):
            raise error
        fact = f"no server answers at {self.endpoint}"
        available = f"last try: {error.fact if isinstance(error, KVFrameworkError) else error}" if error else ""
        raise ServerGone(fact, available=available, hint=getattr(error, "hint", "") or _START_HINT)

    def when_up(self, callback: Callable[[], None]) -> None:
        """Register a callback for all further handshakes: it runs in the connection's thread, before others call."""
        self._on_up.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(ValueError):
            self._on_up.remove(callback)

    def cancel_when_down(self, work: Future[Any]) -> None:
        """Cancel `work`, which waits for a thread of the engine's, at the end of this connection."""
        self._until_down.add(work)
        work.add_done_callback(self._until_down.discard)
        if self._connection.state == "down":
            work.cancel()

    def map_ahead(self) -> None:
        """See `EngineDrivenLink`."""
        self._maps_ahead = True
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
        """Send a request and wait for its answer; `timeout` in seconds, None: that of the table. `on_late` gets a later
        answer, in the connection's thread. Raises typed errors, `DeadlineExceeded` and `ServerGone`."""
        wait = self.deadlines.of(name) if timeout is None else timeout
        late = only(response, on_late)
        return as_response(self._connection.ask(name, payload, timeout=wait, urgent=urgent, on_late=late), response)

    def begin(
        self, name: str, payload: Message, response: type[M], *, urgent: bool = False, waits: bool = True
    ) -> Future[M]:
        """Send a request from an engine's thread, which waits `deadlines.engine_s` at most if it `waits`: the future is
        resolved by then, or later, by the request's own deadline. Never raises."""
        sent = self._begin(name, payload, urgent=urgent, waits=waits)
        return mapped(sent, lambda answer: as_response(answer.payload, response))

    def reachable(self, request: str) -> bool:
        """Return whether `begin` would send this request: connected, and the server not silent for its deadline."""
        return self._connection.reachable(self.deadlines.of(request))

    def lost(self, kind: LostKind, code: str, nbytes: int = 0) -> None:
        """Count a failed lookup, load or store of `nbytes`, by its error's code, for the server's status."""
        if code == ServerGone.code and self._connection.state == "suspect":
            code = DeadlineExceeded.code  # the server is there, and does not answer
        self._connection.reports.lost(kind, code, nbytes)

    def send(self, name: str, payload: Message) -> None:
        """Send a request without interest in its answer. Never blocks, never raises."""
        self._connection.begin(name, payload, timeout=self.deadlines.of(name), urgent=True)

    def free_soon(self, *tickets: str) -> None:
        """Free tickets, and leases of grants, with the next LOOKUP or PING, ahead of a store, if the server can."""
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
        """Return the seconds that one round trip through the server's loop takes (NOOP). Raises as `request` does."""
        started = time.perf_counter()
        self.request("NOOP", m.Empty(), m.Empty, timeout=timeout)
        return time.perf_counter() - started

    def chunk_tokens(self, namespace: bytes) -> int:
        """Return the tokens of a chunk of a registered namespace, of this client or another. Blocking. Raises
        `RequestError` for a namespace that is not registered, and the errors of `request`."""
        return self.request("GET_CHUNK_SIZE", m.GetChunkSize(namespace), m.ChunkSize).chunk_size

    def close(self) -> None:
        """Close the liveness socket, which ends all that the server holds for this process. Idempotent."""
        self._connection.close()
        self._down()

    # the connection's supervisor thread

    def _up(self, reply: m.HelloReply, arena_fd: int | None) -> None:
        self._arena = None if arena_fd is None else self._mapped(arena_fd)
        if self._maps_ahead:
            self.map_ahead()
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
            hint, available = "install the same hasher beside the engine and the server", f"{hasher.fingerprint} here"
            raise VersionMismatch(f"the server hashes with {reply.hasher_fingerprint}", available=available, hint=hint)
        return hasher


def _naming(reply: m.HelloReply) -> tuple[str, ...]:
    """Return the settings on which all names of a server's objects depend."""
    return (
        f"chunk size {reply.chunk_size}",
        f"hasher {reply.hasher_fingerprint}",
        f"tp_lcm {reply.tp_lcm}",
        f"pp_lcm {reply.pp_lcm}",
    )
