"""`MessageServer`: its endpoints, one liveness socket, one serving thread with one poller.

The thread that calls `serve_forever` runs every inline handler, sends every reply and calls `on_tick` and
`on_session_end`; only pooled handlers run elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

import zmq

from kvframework.errors import EndpointError, ShuttingDown
from kvframework.messaging.curve import ServerKeys
from kvframework.messaging.frames_io import Socket, readable
from kvframework.messaging.polling import Wakeup
from kvframework.messaging.server.admission import Gate, ZapHandler
from kvframework.messaging.server.dispatch import Dispatcher, Refusals, Served
from kvframework.messaging.server.handlers import InFlight, RequestDurations
from kvframework.messaging.server.sessions import ClientSession, LivenessServer, SessionTable
from kvframework.messaging.server.sockets import EndpointFiles, Listeners, ReplySender
from kvframework.status import MessagingCounters, zeros
from kvframework.wire.protocol import REQUESTS

logger = logging.getLogger(__name__)

MESSAGES_PER_ROUND = 64  # so that liveness and deadlines are served under a flood
ROUND_S = 0.05
SESSIONS_END_S = 0.5  # at the server's end; the remaining sessions end with the process
# Over TCP one big frame is encrypted in one go; a second thread of ZMQ keeps that from delaying other clients.
IO_THREADS, IO_THREADS_TCP = 1, 2


@dataclass
class _Bound:
    """The resources between `bind()` and the end of serving."""

    listeners: Listeners
    poller: zmq.Poller
    liveness: LivenessServer | None
    zap: ZapHandler | None
    gate: Gate
    calls: InFlight
    dispatcher: Dispatcher


class MessageServer:
    """Serves `endpoint`: an `ipc://` one to the processes of this user and of `admit_uids`, or a `tcp://` one; also
    `tcp`, unless it is "".
    `bind()`, then `serve_forever()`, until `stop()`.

    Over TCP only the clients that `curve` admits are served; None: any client, unencrypted. `on_tick()` is called every
    `tick_s`. `admit_readers` is the gate's. `counters`, `refusals` and `durations` may be read from any thread.
    """

    def __init__(
        self,
        endpoint: str,
        served: Served,
        *,
        tick_s: float = 0.1,
        session_timeout_s: float = 30.0,
        workers: int = 2,
        tcp: str = "",
        curve: ServerKeys | None = None,
        admit_uids: Collection[int] = (),
        admit_readers: Callable[[bool], None] | None = None,
    ) -> None:
        self.counters: dict[str, int] = Counter(zeros(MessagingCounters))
        self._endpoints = [endpoint, tcp] if tcp else [endpoint]
        self._files = None if endpoint.startswith("tcp://") else EndpointFiles(endpoint, shared=bool(admit_uids))
        self._admit_uids = admit_uids
        self._admit_readers = admit_readers
        self._curve = curve
        self._served = served
        self._tick_s = tick_s
        self._workers = workers
        self._clock = time.monotonic
        self.refusals = Refusals(self._clock)
        self.durations = RequestDurations({**REQUESTS, **served.handlers})
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

    def configure(self, *, session_timeout_s: float) -> None:
        """Change the longest silence of a client without a liveness socket. May be called from any thread."""
        self._table.timeout_s = session_timeout_s

    def descriptors(self) -> dict[str, object]:
        """Return the gate's view for the status document. May be called from any thread; empty while nothing is
        bound."""
        bound = self._bound
        return bound.gate.status() if bound is not None else {}

    def bind(self) -> None:
        """Take the endpoint and listen. Raises `EndpointError`, also if another server holds the endpoint."""
        resources = self._resources
        if self._files is not None:
            self._files.acquire()
            resources.callback(self._files.release)
        try:
            self._bound = self._open(resources)
        except (OSError, zmq.ZMQError) as error:
            resources.close()
            raise EndpointError(f"cannot listen: {error}", where=" and ".join(self._endpoints)) from error

    def serve_forever(self) -> None:
        """Serve until `stop()`, then end every session and close everything. Blocks: the caller becomes the serving
        thread. Binds if `bind` was not called. No message and no handler can end it."""
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
        """Make `serve_forever` return: new requests are refused with `ShuttingDown`, those in flight get `grace_s`
        seconds. Returns at once; may be called from any thread, from a handler and from a signal handler."""
        self._grace_s = grace_s
        self._stopping = True
        self._wakeup.signal()

    def wake(self) -> None:
        """Make the loop begin its next round now. May be called from any thread."""
        self._wakeup.signal()

    def abandon(self) -> None:
        """Remove the endpoint's files and nothing else, for a process that ends at once. Safe from any thread."""
        if self._files is not None:
            self._files.release()

    def close(self) -> None:
        """Release the resources of `bind()`, for a server that never served. Idempotent; not while `serve_forever`
        runs."""
        self._bound = None
        self._resources.close()
        self._wakeup.close()

    def _open(self, resources: contextlib.ExitStack) -> _Bound:
        liveness = None
        if self._files is not None:
            liveness = LivenessServer(
                self._files.liveness,
                arena_for=self._served.arena_for,
                find=self._table.by_token,
                clock=self._clock,
                counters=self.counters,
                admit_uids=self._admit_uids,
            )
            resources.callback(liveness.close)
        listeners, zap = self._listen(resources)
        gate = Gate(listeners.tcp, self._files.show if self._files else None, self.counters, self._admit_readers)
        resources.callback(gate.close)
        replies = ReplySender(listeners, self.counters)
        calls = InFlight(
            self._served.handlers,
            replies,
            workers=self._workers,
            wake=self._wakeup.signal,
            clock=self._clock,
            counters=self.counters,
            durations=self.durations,
        )
        resources.callback(calls.close)
        dispatcher = Dispatcher(
            self._served,
            sessions=self._table,
            calls=calls,
            replies=replies,
            liveness=liveness,
            liveness_path=lambda who: self._files.liveness if self._files and listeners.is_local(who) else "",
            counters=self.counters,
            refusals=self.refusals,
            durations=self.durations,
            clock=self._clock,
            check_room=gate.check,
        )
        poller = zmq.Poller()
        for source in (*listeners.sockets, self._wakeup.fd):
            poller.register(source, zmq.POLLIN)
        if liveness is not None:
            poller.register(liveness.fileno(), zmq.POLLIN)
        if zap is not None:
            poller.register(zap.socket, zmq.POLLIN)
        gate.start()
        return _Bound(listeners, poller, liveness, zap, gate, calls, dispatcher)

    def _listen(self, resources: contextlib.ExitStack) -> tuple[Listeners, ZapHandler | None]:
        remote = any(endpoint.startswith("tcp://") for endpoint in self._endpoints)
        context = zmq.Context(IO_THREADS_TCP if remote else IO_THREADS)
        resources.callback(context.term)  # after the sockets: flushes sent messages, for a moment
        zap = None
        if remote and self._curve is not None:
            zap = ZapHandler(context, self._curve.admitted, self.counters)
            resources.callback(zap.close)
        listeners = Listeners(context, self._admit_uids)
        resources.callback(listeners.close)
        for endpoint in self._endpoints:
            listeners.open(endpoint, self._curve)
        return listeners, zap

    def _guarded_round(self, bound: _Bound, until: float = math.inf) -> None:
        try:
            self._round(bound, until)
        except Exception:
            self.counters["loop_errors"] += 1
            logger.exception("the serving loop continues after an internal error")
            time.sleep(0.01)

    def _round(self, bound: _Bound, until: float) -> None:
        """Wait for the first event and handle a bounded amount of everything."""
        wake_at = min(self._next_tick, bound.calls.next_deadline() or math.inf, self._served.next_at(), until)
        wait_s = 0.0 if bound.calls.has_results else max(wake_at - self._clock(), 0.0)
        ready = dict(bound.poller.poll(math.ceil(wait_s * 1000)))
        if self._wakeup.fd in ready:
            self._wakeup.drain()
        if bound.zap is not None and bound.zap.socket in ready:
            bound.zap.serve()
        if bound.liveness is not None and bound.liveness.fileno() in ready:
            for session in bound.liveness.serve():
                bound.dispatcher.end(session)
        if self._served.next_at() <= self._clock():
            self._served.on_time()
        bound.calls.collect()
        for router in bound.listeners.sockets:
            if router in ready:
                self._receive(bound, router)
        now = self._clock()
        bound.calls.expire(now)
        if now >= self._next_tick:
            self._next_tick = now + self._tick_s
            self._tick(bound, now)

    def _receive(self, bound: _Bound, router: Socket) -> None:
        bound.dispatcher.stopping = self._stopping
        until = self._clock() + ROUND_S
        for _ in range(MESSAGES_PER_ROUND):
            frames = bound.listeners.receive(router)
            if frames is None:
                return
            bound.dispatcher.on_message(frames)
            if not readable(router) or self._clock() >= until:
                return

    def _tick(self, bound: _Bound, now: float) -> None:
        if bound.liveness is not None:
            bound.liveness.expire(now)
        for session in self._table.expire(now):
            logger.warning("session %d of %s was silent for too long", session.session_id, session.name)
            bound.dispatcher.end(session)
        try:
            self._served.on_tick()
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
        for router in bound.listeners.sockets:
            self._receive(bound, router)
        while bound.calls.in_flight and self._clock() < until:
            self._guarded_round(bound, until)
        bound.calls.answer_all(ShuttingDown("the server stopped before the request was done"))
        sessions, until = self._table.sessions(), self._clock() + SESSIONS_END_S
        while sessions and self._clock() < until:
            bound.dispatcher.end(sessions.pop())
        if sessions:
            logger.warning("%d sessions end with the server, without a GOODBYE", len(sessions))
