"""`KVClient`, one engine process's connection to the server: handshake, arena mapping, reconnects.

The connection's own threads do the I/O. Requests come from engine threads: those of any kind are in `calls.py`, those
of transports in `transfers.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvframework.api.futures import Future
from kvframework.api.hasher import HasherProvider, KeyHasher
from kvframework.api.requests import RequestSpec
from kvframework.api.transport import EngineLink
from kvframework.client.arena_mapping import MappedArena
from kvframework.client.calls import Withdrawals
from kvframework.client.transfers import EngineDrivenCalls, ServerDrivenCalls
from kvframework.config import default_endpoint, parse_endpoint
from kvframework.errors import KVFrameworkError, ServerGone, VersionMismatch
from kvframework.messaging.client.connection import Connection
from kvframework.messaging.curve import CurveKeyError, CurveKeys, LoadedKeys
from kvframework.registry.registry import PluginRegistry
from kvframework.wire import messages as m
from kvframework.wire.protocol import (
    LOOKUP_GRANT,
    LOOKUP_PRICE,
    LOOKUP_WAIT,
    ONE_WAY,
    REQUESTS,
    SALTED_TOKEN_IDS,
    TOKEN_IDS,
    deadlines_for,
    offer,
)

# The choice of a client's CURVE keys: those given, else those that the environment names; none for a local server.

log = logging.getLogger(__name__)

SECRET_VARIABLE = "KVFRAMEWORK_CURVE_SECRET"  # noqa: S105 - a name
SERVER_VARIABLE = "KVFRAMEWORK_CURVE_SERVER"


def keys_for(endpoint: str, given: CurveKeys | None, environ: Mapping[str, str] = os.environ) -> LoadedKeys | None:
    """Return the keys for a connection to `endpoint`. Blocking. Raises `EndpointError` and `CurveKeyError`."""
    if parse_endpoint(endpoint, where="endpoint").kind == "ipc":
        return None
    if given is not None:
        return given.load()
    server, secret = environ.get(SERVER_VARIABLE, ""), environ.get(SECRET_VARIABLE, "")
    if not server and not secret:
        log.warning("no CURVE keys for %s: all that is sent there can be read on its way", endpoint)
        return None
    if not server or not secret:
        raise CurveKeyError(
            f"{SECRET_VARIABLE if server else SERVER_VARIABLE} is not set",
            where=endpoint,
            hint=f"set {SERVER_VARIABLE} to the server's public key file and {SECRET_VARIABLE} to your secret one",
        )
    return CurveKeys(Path(server), Path(secret)).load()


ENDPOINT_VARIABLE = "KVFRAMEWORK_ENDPOINT"
_START_HINT = (
    "start one with: kvframework serve; where it runs already, compare the user and XDG_RUNTIME_DIR of both sides, or "
    "name the endpoint on both"
)


class KVClient(EngineDrivenCalls, ServerDrivenCalls, EngineLink):
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
        self._withdrawals = Withdrawals()
        self._maps_ahead = False
        self._on_up: list[Callable[[], None]] = []
        self._until_down: set[Future[Any]] = set()
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

    def wants_tokens(self, cache_salt: str = "") -> bool:
        """Return whether the server tells routers of prompts with this salt, and so wants the tokens of what is stored
        and loaded, see `RequestHashes`. Never blocks."""
        feature = SALTED_TOKEN_IDS if cache_salt else TOKEN_IDS
        return self._reply is not None and feature in self._reply.features

    @property
    def holds_answers(self) -> bool:
        """Whether the server holds back the answers of lookups that ask for it. Never blocks."""
        return self._reply is not None and LOOKUP_WAIT in self._reply.features

    @property
    def prices_loads(self) -> bool:
        """Whether the server reads what an engine says of its speed. Never blocks."""
        return self._reply is not None and LOOKUP_PRICE in self._reply.features

    @property
    def one_way(self) -> bool:
        """Whether the server takes requests that it does not answer, and tickets to free with others. Never blocks."""
        return self._reply is not None and ONE_WAY in self._reply.features

    @property
    def grants_loads(self) -> bool:
        """Whether the server's lookups prepare loads through the arena, which is mapped here. Never blocks."""
        return self.maps_arena and self._reply is not None and LOOKUP_GRANT in self._reply.features

    def take_freed(self) -> tuple[str, ...]:
        """Return the tickets that a LOOKUP should free: its caller sends them, or gives them back by `free_soon`."""
        return self._connection.freed.take()

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
        error = self._connection.why_down
        if isinstance(error, KVFrameworkError) and not isinstance(error, ServerGone):
            raise error
        raise ServerGone(
            f"no server answers at {self.endpoint}",
            available=f"last try: {error.fact if isinstance(error, KVFrameworkError) else error}" if error else "",
            hint=getattr(error, "hint", "") or _START_HINT,
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

    def cancel_when_down(self, work: Future[Any]) -> None:
        """Cancel `work`, which waits for a thread of the engine's, at the end of this connection, unless it has ended
        by then. Never blocks."""
        self._until_down.add(work)
        work.add_done_callback(self._until_down.discard)
        if self._connection.state == "down":
            work.cancel()

    def map_ahead(self) -> None:
        """See `EngineDrivenLink`."""
        self._maps_ahead = True
        if (arena := self._arena) is not None:
            arena.map_ahead()

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
        self._withdrawals = Withdrawals()
        self._arena = self._mapped(arena_fd) if arena_fd is not None else None
        if self._arena is not None and self._maps_ahead:
            self._arena.map_ahead()
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
        if self._reply is None or _naming(self._reply) == _naming(reply):
            return
        now, before = _naming(reply), _naming(self._reply)
        raise VersionMismatch(
            f"the new server has {', '.join(each for each in now if each not in before)}",
            available=f"{', '.join(each for each in before if each not in now)} as before",
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


def _naming(reply: m.HelloReply) -> tuple[str, ...]:
    """Return the settings on which all names of a server's objects depend."""
    return (
        f"chunk size {reply.chunk_size}",
        f"hasher {reply.hasher_fingerprint}",
        f"tp_lcm {reply.tp_lcm}",
        f"pp_lcm {reply.pp_lcm}",
    )
