"""Owns `MessageServer`: one ROUTER, one liveness socket, one serving thread with one poller.

The thread that calls `serve_forever` runs every inline handler, sends every reply and calls `on_tick` and
`on_session_end`; only pooled handlers run elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq

from kvframework.api import Handler
from kvframework.errors import EndpointError, ShuttingDown
from kvframework.messaging import frames_io
from kvframework.messaging.dispatch import Dispatcher, Welcome
from kvframework.messaging.endpoint import EndpointFiles, private_umask
from kvframework.messaging.inflight import InFlight
from kvframework.messaging.liveness import LivenessServer
from kvframework.messaging.replies import ReplySender
from kvframework.messaging.session import ClientSession, SessionTable
from kvframework.messaging.wakeup import Wakeup

logger = logging.getLogger(__name__)

MESSAGES_PER_ROUND = 64  # so that liveness and deadlines are served under a flood
ROUND_S = 0.05
FLUSH_MS = 200
_HEAD_FRAMES = 1 + frames_io.HEAD_FRAMES


@dataclass
class _Bound:
    """What exists between `bind()` and the end of serving."""

    router: frames_io.Socket
    poller: zmq.Poller
    liveness: LivenessServer
    calls: InFlight
    dispatcher: Dispatcher


class MessageServer:
    """Serves one `ipc://` endpoint to the processes of this user. `bind()`, then `serve_forever()`, until `stop()`.

    `handlers` are those of `check_handlers`. `welcome(hello, session, version)` makes HELLO's reply; its `session`,
    `version` and `liveness` are filled in here. `arena_fd` is borrowed and passed to every client; None: there is none.
    `on_session_end(session)` is called exactly once for every session, `on_tick()` every `tick_s`; what they raise is
    logged. `counters` may be read from any thread.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        handlers: Mapping[str, Handler[Any]],
        welcome: Welcome,
        hasher_fingerprint: str,
        arena_fd: int | None,
        on_session_end: Callable[[ClientSession], None],
        on_tick: Callable[[], None],
        tick_s: float = 0.1,
        session_timeout_s: float = 30.0,
        workers: int = 2,
    ) -> None:
        self.counters: dict[str, int] = Counter()
        self._files = EndpointFiles(endpoint)
        self._handlers = handlers
        self._welcome = welcome
        self._hasher_fingerprint = hasher_fingerprint
        self._arena_fd = arena_fd
        self._on_session_end = on_session_end
        self._on_tick = on_tick
        self._tick_s = tick_s
        self._workers = workers
        self._clock = time.monotonic
        self._table = SessionTable(self._clock, session_timeout_s=session_timeout_s)
        self._wakeup = Wakeup()
        self._resources = contextlib.ExitStack()
        self._bound: _Bound | None = None
        self._next_tick = 0.0
        self._tick_failing = False
        self._stopping = False
        self._grace_s = 0.0

    @property
    def sessions(self) -> list[ClientSession]:
        """A snapshot; may be taken from any thread."""
        return self._table.sessions()

    def bind(self) -> None:
        """Takes the endpoint and listens. Raises `EndpointError`, also if another server holds the endpoint."""
        self._files.acquire()
        resources = self._resources
        resources.callback(self._files.release)
        try:
            self._bound = self._open(resources)
        except (OSError, zmq.ZMQError) as error:
            resources.close()
            raise EndpointError(f"cannot listen: {error}", where=self._files.endpoint) from error

    def serve_forever(self) -> None:
        """Serves until `stop()`, then ends every session and closes everything. Blocks: the caller's is the serving
        thread. Binds if that was not done. No message and no handler can end it."""
        if self._bound is None:
            self.bind()
        bound = self._bound
        assert bound is not None
        try:
            while not self._stopping:
                self._guarded_round(bound)
        finally:
            try:
                self._wind_down(bound)
            finally:
                self.close()

    def stop(self, grace_s: float = 2.0) -> None:
        """Makes `serve_forever` return: new requests are refused with `ShuttingDown`, those in flight get `grace_s`
        seconds. Returns at once; may be called from any thread, from a handler and from a signal handler."""
        self._grace_s = grace_s
        self._stopping = True
        self._wakeup.signal()

    def abandon(self) -> None:
        """Removes the endpoint's files and nothing else, for a process that ends at once. Safe from any thread."""
        self._files.release()

    def close(self) -> None:
        """Releases what `bind()` took, for a server that never served. Idempotent; not while `serve_forever` runs."""
        self._bound = None
        self._resources.close()

    def _open(self, resources: contextlib.ExitStack) -> _Bound:
        liveness = LivenessServer(
            self._files.liveness,
            arena_fd=self._arena_fd,
            find=self._table.by_token,
            clock=self._clock,
            counters=self.counters,
        )
        resources.callback(liveness.close)
        context = zmq.Context()
        resources.callback(context.term)  # after the socket: flushes what was sent, at most FLUSH_MS
        router = context.socket(zmq.ROUTER)
        resources.callback(router.close, FLUSH_MS)
        frames_io.bound(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.LINGER, FLUSH_MS)
        with private_umask():
            router.bind(self._files.endpoint)
        replies = ReplySender(router, self.counters)
        calls = InFlight(
            self._handlers,
            replies,
            workers=self._workers,
            wake=self._wakeup.signal,
            clock=self._clock,
            counters=self.counters,
        )
        resources.callback(calls.close)
        dispatcher = Dispatcher(
            sessions=self._table,
            calls=calls,
            replies=replies,
            liveness=liveness,
            liveness_path=self._files.liveness,
            welcome=self._welcome,
            hasher_fingerprint=self._hasher_fingerprint,
            on_session_end=self._on_session_end,
            counters=self.counters,
        )
        poller = zmq.Poller()
        for source in (router, self._wakeup.fd, liveness.fileno()):
            poller.register(source, zmq.POLLIN)
        return _Bound(router, poller, liveness, calls, dispatcher)

    def _guarded_round(self, bound: _Bound, until: float = math.inf) -> None:
        try:
            self._round(bound, until)
        except Exception:
            self.counters["loop_errors"] += 1
            logger.exception("the serving loop goes on after an error of its own")
            time.sleep(0.01)

    def _round(self, bound: _Bound, until: float) -> None:
        """Waits for whatever comes first and handles a bounded amount of everything."""
        wake_at = min(self._next_tick, bound.calls.next_deadline() or math.inf, until)
        ready = dict(bound.poller.poll(max(0, math.ceil((wake_at - self._clock()) * 1000))))
        if self._wakeup.fd in ready:
            self._wakeup.drain()
        if bound.liveness.fileno() in ready:
            for session in bound.liveness.serve():
                bound.dispatcher.end(session)
        bound.calls.collect()
        if bound.router in ready:
            self._receive(bound)
        now = self._clock()
        bound.calls.expire(now)
        if now >= self._next_tick:
            self._next_tick = now + self._tick_s
            self._tick(bound, now)

    def _receive(self, bound: _Bound) -> None:
        bound.dispatcher.stopping = self._stopping
        until = self._clock() + ROUND_S
        for _ in range(MESSAGES_PER_ROUND):
            frames = frames_io.receive(bound.router, _HEAD_FRAMES)
            if frames is None:
                return
            bound.dispatcher.on_message(frames)
            if self._clock() >= until:
                return

    def _tick(self, bound: _Bound, now: float) -> None:
        bound.liveness.expire(now)
        for session in self._table.expire(now):
            logger.warning("session %d of %s was silent for too long", session.session_id, session.name)
            bound.dispatcher.end(session)
        try:
            self._on_tick()
            self._tick_failing = False
        except Exception:
            self.counters["tick_errors"] += 1
            if not self._tick_failing:  # one line, not one a tick
                logger.exception("a tick failed")
            self._tick_failing = True

    def _wind_down(self, bound: _Bound) -> None:
        self._stopping = True
        logger.info("stopping: %d requests in flight have %.1f s", bound.calls.in_flight, self._grace_s)
        until = self._clock() + self._grace_s
        self._receive(bound)
        while bound.calls.in_flight and self._clock() < until:
            self._guarded_round(bound, until)
        bound.calls.answer_all(ShuttingDown("the server stopped before the request was done"))
        for session in self._table.sessions():
            bound.dispatcher.end(session)
