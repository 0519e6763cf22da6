"""`Connection`, the client's end of the wire: it keeps a link to the server up and hands requests to it.

Two threads: the link's I/O thread, and the supervisor thread here, which dials, says HELLO, and calls `on_up` and
`on_down`: these may therefore issue requests themselves. The bulk socket, once used, has its own I/O thread."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq

from kvframework import errors
from kvframework.api.endpoint import Endpoint, parse_endpoint
from kvframework.api.futures import Future
from kvframework.api.requests import Buffer, Message, RequestSpec
from kvframework.config.endpoint import FULL_SUFFIX, check_private_directory, trusted_server_uid
from kvframework.messaging import frames_io
from kvframework.messaging.client.link import Answer, Link, OnLate, Request
from kvframework.messaging.client.liveness import LivenessLink, Reports, Watch
from kvframework.messaging.curve import LoadedKeys
from kvframework.messaging.polling import FOR_A_CONNECTION, as_out_of_resources, need
from kvframework.supervise.state import Backoff
from kvframework.wire.frames import ERROR_TYPE, Envelope, ErrorPayload, decode, error_from, join, split
from kvframework.wire.messages import CancelReply, Goodbye, Hello, HelloReply
from kvframework.wire.protocol import LOCAL, ClientDeadlines

logger = logging.getLogger(__name__)

State = Literal["up", "suspect", "down"]

_FIRST_PAUSE_S = 0.05
_UNREACHABLE_PAUSE_S = 0.25
_REFUSED_PAUSE_S = 2.0
_CLOSE_S = 10.0
LOG_AGAIN_S = 60.0
_HELLO_ID, _GOODBYE_ID = 0, 1
_GOODBYE_MS = 200
_POLL_MS = 50
# The I/O threads of a client's context, as bit masks: big frames never delay small ones, even while they are encrypted.
CONTROL, BULK = 0b01, 0b10
IO_THREADS = 2
# Twice the need of a context with its first connection, see `FOR_A_CONNECTION`.
_FOR_A_CONTEXT = {"descriptors": 2 * FOR_A_CONNECTION, "threads": 4}
# The control socket monitors whether the server lives; a PING would wait behind the bulk.
_BULK_PING_S = 3600.0


@dataclass(eq=False, repr=False)
class Connection:
    """A connection that reconnects by itself, also where this process lacks descriptors or threads for one. `start()`,
    then requests from any thread, then `close()`.

    `on_up(reply, arena_fd)` is called after every successful HELLO, in the supervisor thread; it owns `arena_fd`. Until
    it returns only `urgent` requests are sent. If it raises, the connection is dropped and tried again. `on_down()`
    follows every `on_up` that returned. `reports` go to the server. A forked child cannot use or disturb its parent's.
    """

    endpoint: str
    hello: Hello
    table: Mapping[str, RequestSpec]
    on_up: Callable[[HelloReply, int | None], None]
    on_down: Callable[[], None]
    deadlines: ClientDeadlines = LOCAL
    keys: LoadedKeys | None = None

    def __post_init__(self) -> None:
        self.reports = Reports()
        # The error of the last attempt to connect, or the reason for the connection's end; None while it is up.
        self.last_error: Exception | None = None
        self._log_again_at = 0.0
        self._pid = os.getpid()
        self._link: Link | None = None
        # The second socket of the session, made by the first thread that needs it.
        self._bulk: Link | None = None
        self._opening_bulk = threading.Lock()
        self._welcomed = self._was_up = False
        self._context: zmq.Context[Any] | None = None
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to connect, unless it has begun. Returns at once. Without a thread now, reading `state` tries again."""
        if not self._starting.acquire(blocking=False):
            return
        try:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._supervise, name="kvf-connection", daemon=True)
                self._thread.start()
        except RuntimeError as error:
            self._thread = None
            self._note(error)
        finally:
            self._starting.release()

    def wait_up(self, timeout: float) -> bool:
        """Wait until the state is "up", at most `timeout` seconds; return whether it is."""
        if os.getpid() != self._pid:
            return False
        deadline = time.monotonic() + timeout
        with self._changed:
            while self.state != "up" and not self._closing.is_set() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, _UNREACHABLE_PAUSE_S))
        return self.state == "up"

    @property
    def state(self) -> State:
        """The state of the connection. "suspect": a request or PING was not answered in time, and no PING since.
        "down": there is no server."""
        link = self._link
        if link is None or not self._welcomed or not link.alive or os.getpid() != self._pid:
            if self._thread is None and os.getpid() == self._pid:
                self.start()
            return "down"
        return "suspect" if link.watch.suspect else "up"

    @property
    def was_up(self) -> bool:
        """Whether the state has ever been "up"; within `on_up`, which makes it so, it is said to have been."""
        return self._was_up or threading.current_thread() is self._thread

    @property
    def boot_id(self) -> bytes | None:
        link = self._link
        return link.boot_id if link is not None and link.alive else None

    def liveness_fd(self) -> int | None:
        """Return a descriptor that, while it is open, keeps the server from taking this process for dead (None over
        TCP). The caller closes it. Must be called from within `on_up`."""
        link = self._link
        return link.liveness.duplicate() if link is not None and link.liveness is not None else None

    def ask(
        self, name: str, payload: Message, *, timeout: float, urgent: bool = False, on_late: OnLate | None = None
    ) -> Message:
        """Send a request and wait for its answer; the calling thread receives by itself. Raises the error with which
        the future of `begin` would fail. Not for callbacks of futures."""
        spec = self._spec(name)
        return self._usable(urgent).ask(spec, payload, timeout=timeout, on_late=on_late)

    def begin(
        self,
        name: str,
        payload: Message,
        buffers: Sequence[Buffer] = (),
        *,
        timeout: float,
        turn: float = 0.0,
        urgent: bool = False,
        silence_s: float = 0.0,
        bulk: bool = False,
        on_late: OnLate | None = None,
    ) -> Future[Answer]:
        """Send a request and return its future. Never raises. Waits for at most `turn` seconds, as `ask` does.

        The future resolves to the response and its buffers, or fails: with the error that the server named,
        `DeadlineExceeded` after `timeout` seconds (the connection is "suspect" then, until a PING is answered), or
        `ServerGone`: at once if the connection is down, or suspect and the request not `urgent`, unless the server has
        been silent for less than `silence_s`. Callbacks, and `on_late` with a response that arrives after the timeout,
        run in the thread that receives: the I/O thread, or a caller's that waits. `on_late` must release what the
        response grants. `cancel()` sends CANCEL; the future then resolves with the server's answer to the request. Big
        buffers are sent without a copy: they must stay unchanged until an answer.

        `bulk` sends it over the session's second socket, for big frames, and blocks for its handshake at first. After a
        timeout there all its requests in flight fail. ZMQ may still read their buffers: never write to these again."""
        try:
            spec = self._spec(name)
            link = self._bulk_link() if bulk else self._usable(urgent, silence_s)
        except errors.KVFrameworkError as error:
            return Future.failed(error.with_traceback(None))
        return link.begin(spec, payload, buffers, timeout=timeout, turn=turn, on_late=on_late)

    def post(self, name: str, payload: Message) -> bool:
        """Send one of `ONE_WAY_REQUESTS` to a server of 0.3 or later. False if it was not sent. Never blocks."""
        try:
            return self._usable(urgent=True).post(self._spec(name), payload)
        except errors.ServerGone:
            return False

    def reachable(self, silence_s: float) -> bool:
        """Whether `begin` would send: "up", or silent for less than this number of seconds. Never blocks."""
        try:
            self._usable(urgent=False, silence_s=silence_s)
        except errors.ServerGone:
            return False
        return True

    def released_nothing_since(self, began: float) -> bool:
        """Whether no END_SESSION can have released what was pinned from `began` on, of the monotonic clock."""
        link = self._link
        return link is not None and link.released_at < began

    def cancel(self, future: Future[Answer]) -> Future[Answer]:
        """Send CANCEL for a request made here, even a late one. The returned future resolves to `CancelReply` once the
        server no longer touches anything for it, or fails with `ServerGone` if its connection has ended."""
        if not isinstance(future, Request):  # it never left this process
            return Future.resolved(Answer(CancelReply(found=False)))
        if os.getpid() != self._pid:
            return Future.failed(errors.ServerGone("the connection belongs to the parent process"))
        return future.cancelled()

    def close(self) -> None:
        """End the connection: pending futures fail with `ServerGone`, `on_down` is called if it was up, both threads
        are joined (not by themselves, and for `_CLOSE_S` at most). Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._closing.set()
        link, thread = self._link, self._thread
        if link is not None:
            if not link.runs_here():
                link.say_goodbye()
            link.close()
        self._notify()
        within = threading.current_thread() is thread or (link is not None and link.runs_here())
        if thread is not None and not within:
            thread.join(_CLOSE_S)

    def _bulk_link(self) -> Link:
        """Return the session's second socket, after a handshake if there is none. Any failure on it discards it: its
        requests in flight fail with `ServerGone`, and no late frame of it can pass for another answer."""
        control = self._usable(urgent=False, silence_s=math.inf)
        with self._opening_bulk:
            bulk = self._bulk
            if not control.alive:
                raise control.gone()
            if bulk is not None:
                if bulk.alive and not bulk.watch.suspect:
                    return bulk
                bulk.close()
            hello = msgspec.structs.replace(self.hello, session=self.hello.replaces, replaces=b"")
            try:
                need(descriptors=FOR_A_CONNECTION)
                with contextlib.ExitStack() as undo:
                    dealer, _ = self._dial(hello, lambda: not control.alive, BULK)
                    undo.callback(dealer.close, 0)
                    bulk = Link(dealer, None, control.boot_id, Watch(_BULK_PING_S, _BULK_PING_S, time.monotonic()))
                    bulk.start()
                    undo.pop_all()
                self._bulk = bulk
            except Exception as error:
                failure = error if isinstance(error, errors.KVFrameworkError) else as_out_of_resources(error)
                if failure is None:
                    raise
                # These errors would refuse a new session too.
                if not isinstance(failure, (errors.ServerGone, errors.ServerFull, errors.OutOfResources)):
                    control.close()  # the session refuses another socket: only a new session can help
                raise failure from None
            return self._bulk

    def _usable(self, urgent: bool, silence_s: float = 0.0) -> Link:
        link, state = self._link, self.state
        allowed = state == "up" or (urgent and os.getpid() == self._pid)
        if link is None or not (allowed or (state == "suspect" and link.watch.silent_s(time.monotonic()) < silence_s)):
            raise errors.ServerGone(f"the connection is {state}", where=self.endpoint)
        return link

    def _spec(self, name: str) -> RequestSpec:
        spec = self.table.get(name)
        if spec is None:
            raise errors.UnknownRequest(f"unknown request {name!r}")
        return spec

    def _supervise(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _REFUSED_PAUSE_S)
        try:
            while not self._closing.is_set():
                try:
                    self._context = self._context or make_context()
                    need(descriptors=FOR_A_CONNECTION)
                    self._connect_once()
                    backoff.reset()
                    self._closing.wait(_FIRST_PAUSE_S)
                except Exception as error:  # noqa: BLE001 (kept, logged and tried again)
                    # This frame keeps no name for the error: its traceback would keep the sockets of the attempt.
                    most = self._note(error)
                    self._closing.wait(min(backoff.delay(time.monotonic()), most))
        finally:
            if self._context is not None:
                self._context.destroy(0)

    def _connect_once(self) -> None:
        """Run one connection, from HELLO to its end. Raises if it did not come up."""
        deadlines = self.deadlines
        dealer, reply = self._dial(self.hello, self._closing.is_set, CONTROL)
        self.hello = msgspec.structs.replace(self.hello, replaces=reply.session)
        with contextlib.ExitStack() as undo:
            undo.callback(dealer.close, 0)
            liveness, arena_fd = None, None
            # Paths of a server on another host do not refer to this host.
            if reply.liveness and self.endpoint.startswith("ipc://"):
                liveness, arena_fd = LivenessLink.connect(reply.liveness, reply.session, deadlines.hello_s)
                undo.callback(liveness.close)
                if arena_fd is not None:
                    undo.callback(os.close, arena_fd)
            watch = Watch(deadlines.ping_every_s, deadlines.silent_s, time.monotonic(), self._notify)
            link = Link(dealer, liveness, reply.boot_id, watch, gone_s=deadlines.gone_s, reports=self.reports)
            link.start()
            undo.pop_all()
        self._link = link
        if self._closing.is_set():
            link.close()
        try:
            self.on_up(reply, arena_fd)
            self.last_error = None
            self._welcomed = self._was_up = True
            logger.info("connected to the server at %s, server start %s", self.endpoint, reply.boot_id.hex()[:8])
            self._notify()
            link.ended.wait()
        except errors.KVFrameworkError as error:
            if not isinstance(error, (errors.ServerGone, errors.DeadlineExceeded)):
                link.say_goodbye(error)
            raise
        finally:
            up, self._welcomed = self._welcomed, False
            link.close()
            self._link = None
            with self._opening_bulk:
                if self._bulk is not None:
                    self._bulk.close()
                self._bulk = None
        if up:
            if not self._closing.is_set():
                self.last_error = link.gone()
                logger.warning("lost the connection to the server at %s: %s", self.endpoint, self.last_error.fact)
            try:
                self.on_down()
            except Exception as error:
                self.last_error = error
                logger.exception("on_down failed")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _note(self, error: Exception) -> float:
        """Record and log the error of an attempt, the same one again after a while, since a cache without hits is
        easily overlooked. Return the longest pause before the next attempt, in seconds."""
        error, now = as_out_of_resources(error) or error, time.monotonic()
        if not self._closing.is_set() and (str(error) != str(self.last_error) or now >= self._log_again_at):
            self._log_again_at = now + LOG_AGAIN_S
            if isinstance(error, errors.ServerGone):
                logger.info("no server answers at %s: %s", self.endpoint, error.fact)
            elif isinstance(error, errors.OutOfResources):
                logger.warning("cannot connect to %s for now: %s", self.endpoint, error)
            elif isinstance(error, errors.KVFrameworkError):
                logger.error("the server at %s cannot be used: %s", self.endpoint, error)
            else:
                logger.error("connecting to %s failed", self.endpoint, exc_info=error)
        self.last_error = error
        return (
            _UNREACHABLE_PAUSE_S if isinstance(error, (errors.ServerGone, errors.OutOfResources)) else _REFUSED_PAUSE_S
        )

    def _dial(self, hello: Hello, closing: Callable[[], bool], io_thread: int) -> tuple[frames_io.Socket, HelloReply]:
        """One attempt to reach the server, blocking: return a connected DEALER, which the caller owns, and HELLO's
        answer. It never reconnects, so that no message for one server reaches another. Raises `ServerGone` without a
        listener, without an answer in time, or on `closing()`; `EndpointError` for an ipc:// endpoint in a directory
        that others may write to; else the server's refusal."""
        address = _probe(self.endpoint, self.deadlines.hello_s)
        unanswered = errors.ServerGone(
            "the server did not answer HELLO", where=self.endpoint, hint=_hint(address, self.keys)
        )
        assert self._context is not None
        with contextlib.ExitStack() as undo:
            dealer = self._context.socket(zmq.DEALER)
            undo.callback(dealer.close, 0)
            # A process that is killed still accepts connections for a moment: else the caller would wait in vain.
            hung_up = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            try:
                frames_io.bound(dealer)
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.setsockopt(zmq.RECONNECT_IVL, -1)
                dealer.setsockopt(zmq.AFFINITY, io_thread)
                if address is not None:
                    frames_io.over_tcp(dealer, address.host)
                    if self.keys is not None:
                        self.keys.apply(dealer)
                dealer.connect(self.endpoint)
                frames_io.send(dealer, join(_HELLO_ID, "HELLO", hello))
                deadline = time.monotonic() + self.deadlines.hello_s
                poller = zmq.Poller()
                poller.register(dealer, zmq.POLLIN)
                poller.register(hung_up, zmq.POLLIN)
                while dealer not in dict(poller.poll(_POLL_MS)):
                    gone = hung_up.poll(0) and not dealer.poll(0)
                    if gone or closing() or time.monotonic() >= deadline:
                        raise unanswered
                envelope = split(frames_io.receive(dealer, frames_io.HEAD_FRAMES) or [])
            except zmq.Again:
                # The server hung up before HELLO was sent, as it does with clients that have no keys.
                raise unanswered from None
            except zmq.ZMQError as error:
                raise errors.ServerGone(f"cannot connect: {error}", where=self.endpoint) from None
            finally:
                dealer.disable_monitor()
                hung_up.close(0)
            reply = _accepted(dealer, envelope, hello)
            undo.pop_all()
        return dealer, reply


def make_context() -> zmq.Context[Any]:
    """Return a context whose threads run. Raises `OutOfResources` and `zmq.ZMQError`; ZMQ ends the process if it lacks
    descriptors or threads while it starts, so a surplus is required."""
    need(**_FOR_A_CONTEXT)
    context = zmq.Context(IO_THREADS)
    try:
        context.socket(zmq.DEALER).close(0)
    except zmq.ZMQError:
        context.destroy(0)
        raise
    return context


def _accepted(dealer: frames_io.Socket, envelope: Envelope, hello: Hello) -> HelloReply:
    """Return the answer to HELLO, with a GOODBYE if this client cannot use it. Raises a refusal and `ProtocolError`."""
    if envelope.type == ERROR_TYPE:
        raise error_from(decode(envelope.payload, ErrorPayload, where="HELLO"))
    try:
        if (envelope.request_id, envelope.type) != (_HELLO_ID, "HELLO"):
            raise errors.ProtocolError(f"the server answered HELLO with {envelope.type!r}")
        reply = decode(envelope.payload, HelloReply, where="HELLO")
        if not hello.min_version <= reply.version <= hello.max_version:
            fact = f"the server chose protocol version {reply.version}"
            hint = "install the same kvframework release for the engine and the server"
            raise errors.VersionMismatch(fact, available=f"{hello.min_version} to {hello.max_version}", hint=hint)
    except errors.ProtocolError as error:
        with contextlib.suppress(zmq.ZMQError):
            frames_io.send(dealer, join(_GOODBYE_ID, "GOODBYE", Goodbye(error.code, error.fact)))
        dealer.close(_GOODBYE_MS)
        raise
    return reply


def _hint(address: Endpoint | None, keys: LoadedKeys | None) -> str:
    if address is None:
        return "a process listens at the endpoint but does not answer; check whether the process is stopped or blocked"
    if keys is None:
        return "a server with CURVE keys does not answer clients without keys: see `kvframework keys new --help`"
    return "check the server's public key here, and that the server admits this client's public key"


def _probe(endpoint: str, timeout: float) -> Endpoint | None:
    """Raise if there is no listener, which ZMQ would not report; return the address of a tcp:// endpoint."""
    address, family = parse_endpoint(endpoint), socket.AF_UNIX
    local = address.kind == "ipc"
    place: Any = address.path
    if local and os.path.exists(place + FULL_SUFFIX) and not os.path.exists(place):
        raise errors.ServerFull(
            "the server accepts no clients for now, because it has few open files left", where=endpoint
        )
    try:
        if not local:
            family, _, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(0.0 if local else timeout)
            probe.connect(place)
        if local:
            # A user who may write there could replace the socket by that of another server.
            check_private_directory(Path(place).parent, owner=trusted_server_uid())
    except OSError as error:
        raise errors.ServerGone(
            f"no server listens at the endpoint: {error.strerror or error}", where=endpoint
        ) from None
    return None if local else address
