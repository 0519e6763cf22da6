"""`MessageServer`: its endpoints, one liveness socket, one serving thread with one poller; and the dispatch of messages
to their session, to HELLO, or to the calls in flight.

The thread that calls `serve_forever` runs every inline handler, sends every reply and calls `on_tick` and
`on_session_end`; only pooled handlers run elsewhere. Every message is answered, with a typed error frame if need be,
unless even its request id cannot be read."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import msgspec
import zmq

from kvframework import errors
from kvframework.api.counter import Histogram
from kvframework.api.requests import Buffer, Handler
from kvframework.messaging.curve import ServerKeys, ZapHandler
from kvframework.messaging.frames_io import Socket, readable
from kvframework.messaging.polling import Wakeup
from kvframework.messaging.server.handlers import FIRST_S, OCTAVES, InFlight
from kvframework.messaging.server.sessions import ClientSession, LivenessServer, Refusals, SessionTable
from kvframework.messaging.server.sockets import EndpointFiles, Gate, Routers
from kvframework.status import MessagingCounters, zeros
from kvframework.wire.frames import NO_ANSWER, REQUEST_ID_BYTES, Envelope, decode, split
from kvframework.wire.messages import Empty, Goodbye, Hello, HelloReply
from kvframework.wire.protocol import ONE_WAY_REQUESTS, REQUESTS, negotiate

logger = logging.getLogger(__name__)

MESSAGES_PER_ROUND = 64  # so that liveness and deadlines are served under a flood
ROUND_S = 0.05
SESSIONS_END_S = 0.5  # at the server's end; the remaining sessions end with the process
ALONE = 3  # a server without clients ticks so many times less often, to leave the processor at rest
MAX_LEFT = 4096


@dataclass(frozen=True)
class Served:
    """The callbacks behind a message server. Called on the serving thread, except for pooled handlers.

    `handlers` has one by the name of every request but HELLO and GOODBYE; that of CANCEL, if any, serves targets that
    are no message in flight. `welcome(hello, session, version, returns)` makes HELLO's reply, but for `session`,
    `version` and `liveness`; `returns`: the client has used an earlier server. `arena_for(session id)` returns a
    descriptor of the arena, which is closed once it is sent, and raises `OSError`; None: there is no arena.
    `on_session_end(session)` is called exactly once for every session, unless very many end with the server; its
    exceptions and those of `on_tick()` are logged. `on_time()` is called when the time `next_at()`, of
    `time.monotonic()`, has come; `MessageServer.wake` makes the loop ask for it again."""

    handlers: Mapping[str, Handler[Any]]
    welcome: Callable[[Hello, ClientSession, int, bool], HelloReply]
    hasher_fingerprint: str
    on_session_end: Callable[[ClientSession], None]
    on_tick: Callable[[], None]
    arena_for: Callable[[int], int] | None = None
    next_at: Callable[[], float] = lambda: math.inf
    on_time: Callable[[], None] = lambda: None


@dataclass(eq=False, repr=False)
class MessageServer:
    """Serves `endpoint`: an `ipc://` one to the processes of this user and of `admit_uids`, or a `tcp://` one; also
    `tcp`, unless it is "". `bind()`, then `serve_forever()`, until `stop()`.

    Over TCP only the clients that `curve` admits are served; None: any client, unencrypted. `on_tick()` is called every
    `tick_s`. `admit_readers` is the gate's. `counters` and what has no other note may be used from any thread."""

    endpoint: str
    served: Served
    tick_s: float = 0.1
    session_timeout_s: InitVar[float] = 30.0
    workers: int = 2
    tcp: str = ""
    curve: ServerKeys | None = None
    admit_uids: Collection[int] = ()
    admit_readers: Callable[[bool], None] | None = None

    def __post_init__(self, session_timeout_s: float) -> None:
        self._routers: Routers
        self._calls: InFlight
        self._liveness: LivenessServer | None
        self._zap: ZapHandler | None
        self.counters: dict[str, int] = Counter(zeros(MessagingCounters))
        self._clock = time.monotonic
        self.refusals = Refusals(self._clock)
        self._durations = {name: Histogram(FIRST_S, OCTAVES) for name in {**REQUESTS, **self.served.handlers}}
        self._endpoints = [each for each in (self.endpoint, self.tcp) if each]
        self._files = None
        if not self.endpoint.startswith("tcp://"):
            self._files = EndpointFiles(self.endpoint, shared=bool(self.admit_uids))
        self._table = SessionTable(self._clock, session_timeout_s=session_timeout_s)
        # Routing ids of sessions that have ended: messages they sent earlier still arrive, and are no failure.
        self._left: dict[bytes, None] = {}
        self._wakeup = Wakeup()
        self.wake = self._wakeup.signal  # makes the loop begin its next round now
        self._poller = zmq.Poller()
        self._resources = contextlib.ExitStack()
        self._gate: Gate | None = None  # None: not bound
        self._next_tick = 0.0
        self._tick_failing = False
        self._stopping = False
        self._grace_s = 0.0

    @property
    def sessions(self) -> list[ClientSession]:
        return self._table.sessions()

    def configure(self, *, session_timeout_s: float) -> None:
        """Change the longest silence of a TCP client before the server ends its session."""
        self._table.timeout_s = session_timeout_s

    def descriptors(self) -> dict[str, object]:
        """Return the gate's view for the status document; empty while nothing is bound."""
        gate = self._gate
        return gate.status() if gate is not None else {}

    def durations(self) -> dict[str, Any]:
        """Return how long requests took, from the receipt to the answer, errors too, by type: `Histogram.octaves`."""
        return {name: histogram.octaves() for name, histogram in self._durations.items()}

    def bind(self) -> None:
        """Take the endpoint and listen. Raises `EndpointError`, also if another server holds the endpoint."""
        if self._files is not None:
            self._files.acquire()
            self._resources.callback(self._files.release)
        try:
            self._open()
        except (OSError, zmq.ZMQError) as error:
            self._resources.close()
            raise errors.EndpointError(
                f"the server cannot listen: {error}", where=" and ".join(self._endpoints)
            ) from error

    def serve_forever(self) -> None:
        """Serve until `stop()`, then end every session and close everything. Blocks: the caller becomes the serving
        thread. No message and no handler can end it."""
        try:
            while not self._stopping:
                self._guarded_round()
        finally:
            try:
                self._wind_down()
            finally:
                self.close()

    def stop(self, grace_s: float = 2.0) -> None:
        """Make `serve_forever` return: new requests are refused with `ShuttingDown`, those in flight get `grace_s`
        seconds. Returns at once; also for a signal's handler."""
        self._grace_s = grace_s
        self._stopping = True
        self._wakeup.signal()

    def abandon(self) -> None:
        """Remove the endpoint's files and nothing else, for a process that ends at once."""
        if self._files is not None:
            self._files.release()

    def close(self) -> None:
        """Release the resources of `bind()`, for a server that never served. Idempotent; not while it serves."""
        self._gate = None
        self._resources.close()
        self._wakeup.close()

    def _open(self) -> None:
        resources = self._resources
        self._poller.register(self._wakeup.fd, zmq.POLLIN)
        self._liveness = None
        if self._files is not None:
            self._liveness = LivenessServer(
                self._files.liveness,
                arena_for=self.served.arena_for,
                find=self._table.by_token,
                counters=self.counters,
                admit_uids=self.admit_uids,
            )
            resources.callback(self._liveness.close)
            self._poller.register(self._liveness.fileno(), zmq.POLLIN)
        remote = any(endpoint.startswith("tcp://") for endpoint in self._endpoints)
        # Over TCP one big frame is encrypted in one go; a second thread of ZMQ keeps that from delaying other clients.
        context = zmq.Context(2 if remote else 1)
        resources.callback(context.term)  # after the sockets: flushes sent messages, for a moment
        self._zap = None
        if remote and self.curve is not None:
            self._zap = ZapHandler(context, self.curve.admitted, self.counters)
            resources.callback(self._zap.close)
            self._poller.register(self._zap.socket, zmq.POLLIN)
        self._routers = Routers(context, self.counters, self.admit_uids)
        resources.callback(self._routers.close)
        for endpoint in self._endpoints:
            self._poller.register(self._routers.open(endpoint, self.curve), zmq.POLLIN)
        gate = Gate(self._files.show if self._files else None, self.counters, self.admit_readers)
        resources.callback(gate.close)
        self._calls = InFlight(
            self.served.handlers,
            self._routers,
            workers=self.workers,
            wake=self._wakeup.signal,
            counters=self.counters,
            took=self._took,
        )
        resources.callback(self._calls.close)
        gate.start()
        self._gate = gate

    def _guarded_round(self, until: float = math.inf) -> None:
        try:
            self._round(until)
        except Exception:
            self.counters["loop_errors"] += 1
            logger.exception("the serving loop continues after an internal error")
            time.sleep(0.01)

    def _round(self, until: float) -> None:
        """Wait for the first event and handle a bounded amount of everything."""
        calls, liveness = self._calls, self._liveness
        wake_at = min(self._next_tick, calls.next_deadline() or math.inf, self.served.next_at(), until)
        wait_s = 0.0 if calls.has_results else max(wake_at - self._clock(), 0.0)
        ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        if self._wakeup.fd in ready:
            self._wakeup.drain()
        if self._zap is not None and self._zap.socket in ready:
            self._zap.serve()
        if liveness is not None and liveness.fileno() in ready:
            for session in liveness.serve():
                self._end(session)
        if self.served.next_at() <= self._clock():
            self.served.on_time()
        calls.collect()
        for router in self._routers.sockets:
            if router in ready:
                self._receive(router)
        now = self._clock()
        calls.expire(now)
        if now >= self._next_tick:
            self._next_tick = now + self.tick_s * (1 if len(self._table) else ALONE)
            self._tick(now)

    def _receive(self, router: Socket) -> None:
        until = self._clock() + ROUND_S
        for _ in range(MESSAGES_PER_ROUND):
            frames = self._routers.receive(router)
            if frames is None:
                return
            self._on_message(frames)
            if not readable(router) or self._clock() >= until:
                return

    def _tick(self, now: float) -> None:
        if self._liveness is not None:
            self._liveness.expire(now)
        for session in self._table.expire(now):
            logger.warning("ending session %d of %s, which sent nothing for too long", session.session_id, session.name)
            self._end(session)
        try:
            self.served.on_tick()
            self._tick_failing = False
        except Exception:
            self.counters["tick_errors"] += 1
            if not self._tick_failing:  # one line, not one a tick
                logger.exception("the server's periodic work failed")
            self._tick_failing = True

    def _wind_down(self) -> None:
        self._stopping = True
        logger.info("stopping: %d requests in progress may take %.1f s", self._calls.in_flight, self._grace_s)
        until = self._clock() + self._grace_s
        for router in self._routers.sockets:
            self._receive(router)
        while self._calls.in_flight and self._clock() < until:
            self._guarded_round(until)
        self._calls.answer_all(errors.ShuttingDown("the server stopped before the request ended"))
        sessions, until = self._table.sessions(), self._clock() + SESSIONS_END_S
        while sessions and self._clock() < until:
            self._end(sessions.pop())
        if sessions:
            logger.warning("%d client sessions end because the server stops", len(sessions))

    # one message

    def _on_message(self, frames: Sequence[Buffer]) -> None:
        """Handle one message, identity first. Never raises because of a peer's message or a handler."""
        received = self._clock()
        identity = bytes(frames[0])
        try:
            envelope = split(frames[1:])
        except errors.ProtocolError as error:
            self.counters["malformed"] += 1
            self.refusals.request(self._table.by_identity(identity), "malformed message", error)
            if len(frames) > 1 and len(frames[1]) == REQUEST_ID_BYTES:
                self._routers.send_error(identity, int.from_bytes(frames[1], "little"), error)
            else:
                self.counters["unanswerable"] += 1
            return
        self.counters["requests"] += 1
        try:
            self._on_request(identity, envelope, received)
        except Exception as error:
            if isinstance(error, (errors.HelloRequired, errors.ShuttingDown)):
                pass  # its session has just ended, and it connects again
            elif not isinstance(error, (errors.ProtocolError, errors.ServerFull)):
                logger.exception("%s failed", envelope.type)
            elif envelope.type == "HELLO":
                self.counters["hello_refused"] += 1
                self.refusals.hello(envelope, error)
            else:
                self.refusals.request(self._table.by_identity(identity), envelope.type, error)
            has_left = isinstance(error, errors.HelloRequired) and identity in self._left
            self._routers.send_error(identity, envelope.request_id, error, counted=not has_left)
            self._took(envelope.type, received)

    def _on_request(self, identity: bytes, envelope: Envelope, received: float) -> None:
        session = self._table.by_identity(identity)
        if session is not None:
            self._table.touch(session)
        if self._stopping:
            raise errors.ShuttingDown("the server is stopping")
        if envelope.request_id == NO_ANSWER and envelope.type not in ONE_WAY_REQUESTS:
            raise errors.MalformedFrames(
                "the request id is reserved", where=envelope.type, available="another request id"
            )
        if envelope.type == "HELLO":
            self._hello(identity, session, envelope)
            self._took("HELLO", received)
        elif session is None:
            raise errors.HelloRequired(
                f"{envelope.type!r} arrived before HELLO or after the session's end", hint="send HELLO"
            )
        elif envelope.type == "GOODBYE":
            self._goodbye(identity, session, envelope)
            self._took("GOODBYE", received)
        else:
            self._calls.submit(session, identity, envelope, received)

    def _took(self, name: str, received: float) -> None:
        """Count one answer, an error too, unless a stranger named a request that does not exist."""
        histogram = self._durations.get(name)
        if histogram is not None:
            histogram.add(self._clock() - received)

    def _hello(self, identity: bytes, known: ClientSession | None, envelope: Envelope) -> None:
        if envelope.buffers:
            raise errors.MalformedFrames(
                f"the request has {len(envelope.buffers)} buffers", where="HELLO", available="none"
            )
        hello = decode(envelope.payload, Hello, where="HELLO")
        version = negotiate(hello, self.served.hasher_fingerprint)
        lost = self._table.by_token(hello.replaces)
        returns = bool(hello.replaces) and not self._table.was_opened(hello.replaces)
        # A local session ends with its liveness socket only: until then its process may still write into the arena.
        if lost is not None and lost is not known and not lost.local:
            self._end(lost)
        liveness = self._files.liveness if self._files and self._routers.is_local(identity) else ""
        opened = False
        if hello.session:
            session = self._table.join(identity, hello.session)
        elif known is not None:
            session = known
        else:
            if self._gate is not None:
                self._gate.check()
            session, opened = self._table.open(identity, hello, remote=not liveness), True
        session.version = version
        self.counters["sessions_opened"] += opened
        welcomed = False
        try:
            reply = msgspec.structs.replace(
                self.served.welcome(hello, session, version, returns),
                session=session.token,
                version=version,
                liveness=liveness,
            )
            welcomed = self._routers.send(identity, envelope.request_id, "HELLO", reply)
        finally:
            if opened and not welcomed:  # refused, or the client has left meanwhile and will never send anything
                self._end(session)

    def _goodbye(self, identity: bytes, session: ClientSession, envelope: Envelope) -> None:
        # Its other processes may still write: with several, each says by its liveness socket that it has ended.
        if len(session.processes) <= 1:
            self._end(session)
        self._routers.send(identity, envelope.request_id, "GOODBYE", Empty())
        try:
            goodbye = decode(envelope.payload, Goodbye, where="GOODBYE")
        except errors.InvalidPayload as error:
            goodbye = Goodbye(error.code, error.fact)
        if goodbye.reason:
            self.counters["server_refused"] += 1
            self.refusals.of(session, "server", goodbye.code, goodbye.reason)

    def _end(self, session: ClientSession) -> None:
        """End a session: cancel its calls in flight, then call `on_session_end`, exactly once per session."""
        if not self._table.end(session):
            return
        self.counters["sessions_ended"] += 1
        self._left.update(dict.fromkeys(session.identities))
        while len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]
        if self._liveness is not None:
            self._liveness.drop(session)
        session.local = False
        self._calls.end_session(session)
        try:
            self.served.on_session_end(session)
        except Exception:
            logger.exception("ending session %d of %s failed", session.session_id, session.name)
