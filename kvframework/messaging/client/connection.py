"""`Connection`, the client's end of the wire: it keeps a link to the server up and hands requests to it.

Two threads: the link's I/O thread, and the supervisor thread here, which dials, says HELLO, and calls `on_up` and
`on_down`: these may therefore issue requests themselves. The bulk socket, once used, has its own I/O thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import zmq

from kvframework.api.futures import Future
from kvframework.api.requests import Buffer, Message, RequestSpec
from kvframework.errors import (
    DeadlineExceeded,
    KVFrameworkError,
    MalformedFrames,
    OutOfResources,
    ServerGone,
    UnknownRequest,
)
from kvframework.messaging.client.dial import BULK, CONTROL, BulkSocket, dial, make_context
from kvframework.messaging.client.link import Answer, Link, OnLate, RequestFuture
from kvframework.messaging.client.liveness import Heartbeat, LivenessLink, Reports
from kvframework.messaging.curve import LoadedKeys
from kvframework.messaging.frames_io import Socket
from kvframework.messaging.polling import FOR_A_CONNECTION, as_out_of_resources, need
from kvframework.supervise.state import Backoff
from kvframework.wire.messages import CancelReply, Hello, HelloReply
from kvframework.wire.protocol import LOCAL, ClientDeadlines

logger = logging.getLogger(__name__)

State = Literal["up", "suspect", "down"]

_FIRST_PAUSE_S = 0.05
_UNREACHABLE_PAUSE_S = 0.25
_REFUSED_PAUSE_S = 2.0
_LATER_S = 0.01
_CLOSE_S = 10.0
LOG_AGAIN_S = 60.0


class WhyDown:
    """`error` is that of the last attempt, None after a successful one; `unanswered` is the error of the present
    attempt if its HELLO gets no answer."""

    def __init__(self, endpoint: str) -> None:
        self.error: Exception | None = None
        self.unanswered: ServerGone | None = None
        self._endpoint = endpoint
        self._log_again_at = 0.0

    @property
    def most_telling(self) -> Exception | None:
        """The most specific reason: a refusal before silence, silence before a server that was not found."""
        if self.error is not None and not isinstance(self.error, ServerGone):
            return self.error
        return self.unanswered or self.error

    def note(self, error: Exception, *, quiet: bool) -> None:
        """Record the error of an attempt. Unless `quiet`, log it: loudly, unless there is just no server; again after a
        while, since a cache without hits is easily overlooked."""
        now = time.monotonic()
        if not quiet and (str(error) != str(self.error) or now >= self._log_again_at):
            self._log_again_at = now + LOG_AGAIN_S
            if isinstance(error, ServerGone):
                logger.info("no server at %s: %s", self._endpoint, error.fact)
            elif isinstance(error, OutOfResources):
                logger.warning("no connection to %s for now: %s", self._endpoint, error)
            elif isinstance(error, KVFrameworkError):
                logger.error("the server at %s cannot be used: %s", self._endpoint, error)
            else:
                logger.error("connecting to %s failed", self._endpoint, exc_info=error)
        self.error = error
        self.unanswered = None


class Connection:
    """A connection that reconnects by itself. `start()`, then requests from any thread, then `close()`.

    `on_up(reply, arena_fd)` is called after every successful HELLO, in the supervisor thread; it owns `arena_fd`. Until
    it returns only `urgent` requests are sent. If it raises, the connection is dropped and tried again. `on_down()`
    follows every `on_up` that returned. `reports` go to the server. A forked child cannot use its parent's connection
    and does not disturb it.

    While this process has too few descriptors or threads left for a connection, there is none, and it is tried again.
    """

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        *,
        table: Mapping[str, RequestSpec],
        on_up: Callable[[HelloReply, int | None], None],
        on_down: Callable[[], None],
        deadlines: ClientDeadlines = LOCAL,
        keys: LoadedKeys | None = None,
    ) -> None:
        self.reports = Reports()
        self._why = WhyDown(endpoint)
        self._endpoint = endpoint
        self._hello = hello
        self._table = table
        self._on_up = on_up
        self._on_down = on_down
        self._deadlines = deadlines
        self._keys = keys
        self._pid = os.getpid()
        self._link: Link | None = None
        self._bulk: BulkSocket | None = None
        self._welcomed = self._was_up = False
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._starting = threading.Lock()
        self._start_again_at = math.inf
        self._thread = self._supervisor()

    def start(self) -> None:
        """Start to connect. Returns at once; may be called once. If the process gets no thread now, a later read of
        `state` starts it."""
        with self._starting:
            self._start_thread()

    def wait_up(self, timeout: float) -> bool:
        """Wait until the state is "up", at most `timeout` seconds; return whether it is."""
        if os.getpid() != self._pid:
            return False
        deadline = time.monotonic() + timeout
        with self._changed:
            while self.state != "up" and not self._closing.is_set() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, max(self._start_again_at - time.monotonic(), 0.0) + _LATER_S))
        return self.state == "up"

    @property
    def state(self) -> State:
        """The state of the connection. "suspect": a request or PING was not answered in time, and no PING since.
        "down": there is no server."""
        link = self._link
        if link is None or not self._welcomed or not link.alive or os.getpid() != self._pid:
            if time.monotonic() >= self._start_again_at:
                self._start_again()
            return "down"
        return "suspect" if link.suspect else "up"

    @property
    def was_up(self) -> bool:
        """Whether the state has ever been "up"; within `on_up`, which makes it so, it is said to have been."""
        return self._was_up or threading.current_thread() is self._thread

    @property
    def boot_id(self) -> bytes | None:
        """The boot id of the connected server, None if there is none."""
        link = self._link
        return link.boot_id if link is not None and link.alive else None

    @property
    def last_error(self) -> Exception | None:
        """The error of the last attempt to connect, or the reason for the connection's end; None while it is up."""
        return self._why.error

    @property
    def why_down(self) -> Exception | None:
        """The most specific known reason, see `WhyDown`."""
        return self._why.most_telling

    def liveness_fd(self) -> int | None:
        """Return a descriptor that, while it is open, keeps the server from taking this process for dead (None over
        TCP). The caller closes it. Must be called from within `on_up`."""
        link = self._link
        return link.liveness_fd() if link is not None else None

    def ask(
        self,
        name: str,
        payload: Message,
        *,
        timeout: float,
        urgent: bool = False,
        on_late: OnLate | None = None,
    ) -> Message:
        """Send a request and wait for its answer: the calling thread sends and receives by itself, so that no other
        thread has to wake. Raises the error with which the future of `begin` would fail. Not for callbacks of
        futures."""
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
        """Send a request and return its future. Never raises. Waits for at most `turn` seconds, as `ask` does: most
        often the future is resolved then.

        The future resolves to the response and its buffers, or fails: with the error that
        the server named, `DeadlineExceeded` after `timeout` seconds (the connection is "suspect" then, until a PING is
        answered), or `ServerGone` (at once if the connection is down, or suspect and the request not `urgent`, unless
        the server has been silent for less than `silence_s`). Its callbacks run in the thread that receives the answer:
        the I/O thread, or a caller's that waits. Big buffers are sent without a copy: they must stay unchanged until an
        answer. `cancel()` on it sends CANCEL; the future then resolves with the server's answer to the request.
        `on_late` is called in the I/O thread with a response that arrives after the timeout; it must release what the
        response grants, since nothing else can.

        `bulk` sends it over the session's second socket, which is reserved for big frames, and blocks for a handshake
        when there is none yet. After a timeout on it all its requests in flight fail, and only those. A future of it
        that has failed does not release the buffers: ZMQ may still read them, so never write to them again.
        """
        try:
            spec = self._spec(name, buffers)
            if bulk:
                return self._bulk_of_session().begin(spec, payload, buffers, timeout)
            link = self._usable(urgent, silence_s)
        except KVFrameworkError as error:
            return Future.failed(error.with_traceback(None))
        return link.begin(spec, payload, buffers, timeout=timeout, turn=turn, on_late=on_late)

    def post(self, name: str, payload: Message) -> bool:
        """Send a request of `ONE_WAY_REQUESTS` that the server does not answer: to one with the feature `one_way`.
        False if it could not be sent. Never blocks."""
        try:
            return self._usable(urgent=True).post(self._spec(name), payload)
        except ServerGone:
            return False

    def reachable(self, silence_s: float) -> bool:
        """Whether `begin` would send: "up", or silent for less than this number of seconds. Never blocks."""
        try:
            self._usable(urgent=False, silence_s=silence_s)
        except ServerGone:
            return False
        return True

    def released_nothing_since(self, began: float) -> bool:
        """Whether no END_SESSION of this session can have released what was pinned from `began` on, of the monotonic
        clock."""
        link = self._link
        return link is not None and link.releases.none_since(began)

    def cancel(self, future: Future[Answer]) -> Future[Answer]:
        """Send CANCEL for a request made here, even one whose future has failed with `DeadlineExceeded` already.

        The returned future resolves to `CancelReply` once the server no longer touches anything for the request, or
        fails with `ServerGone` if the connection of the request has ended.
        """
        if not isinstance(future, RequestFuture):  # it never left this process
            return Future.resolved(Answer(CancelReply(found=False)))
        if os.getpid() != self._pid:
            return Future.failed(ServerGone("the connection belongs to the parent process"))
        return future.cancelled()

    def close(self) -> None:
        """End the connection: pending futures fail with `ServerGone`, `on_down` is called if it was up, both threads
        are joined (not by themselves, and only for a bounded time, since a resolver may hang). Idempotent; does nothing
        in a forked child."""
        if os.getpid() != self._pid:
            return
        self._closing.set()
        link = self._link
        if link is not None:
            if not link.runs_here():
                link.say_goodbye()
            link.close()
        self._notify()
        within = threading.current_thread() is self._thread or (link is not None and link.runs_here())
        if self._thread.ident is not None and not within:
            self._thread.join(_CLOSE_S)

    def _supervisor(self) -> threading.Thread:
        return threading.Thread(target=self._supervise, name="kvf-connection", daemon=True)

    def _start_thread(self) -> None:
        try:
            self._thread.start()
            self._start_again_at = math.inf
        except RuntimeError as error:
            self._thread = self._supervisor()
            self._note(as_out_of_resources(error) or error)
            self._start_again_at = time.monotonic() + _UNREACHABLE_PAUSE_S

    def _start_again(self) -> None:
        if os.getpid() == self._pid and self._starting.acquire(blocking=False):
            try:
                if time.monotonic() >= self._start_again_at and not self._closing.is_set():
                    self._start_thread()
            finally:
                self._starting.release()

    def _bulk_of_session(self) -> BulkSocket:
        bulk = self._bulk
        if bulk is None or self.state == "down":
            raise ServerGone(f"the connection is {self.state}", where=self._endpoint)
        return bulk

    def _usable(self, urgent: bool, silence_s: float = 0.0) -> Link:
        """Return the link that a request may use now. Raises `ServerGone`."""
        link, state = self._link, self.state
        allowed = state == "up" or (urgent and os.getpid() == self._pid)
        if link is None or not (allowed or (state == "suspect" and link.silent_s() < silence_s)):
            raise ServerGone(f"the connection is {state}", where=self._endpoint)
        return link

    def _spec(self, name: str, buffers: Sequence[Buffer] = ()) -> RequestSpec:
        """Return the spec of a request. Raises `UnknownRequest` and `MalformedFrames`."""
        spec = self._table.get(name)
        if spec is None:
            raise UnknownRequest(f"there is no request {name!r}")
        if len(buffers) > spec.buffers:
            raise MalformedFrames(f"{len(buffers)} buffers", where=name, available=f"at most {spec.buffers}")
        return spec

    def _supervise(self) -> None:
        context = None
        backoff = Backoff(_FIRST_PAUSE_S, _REFUSED_PAUSE_S)
        try:
            while not self._closing.is_set():
                try:
                    context = context or make_context()
                    need(descriptors=FOR_A_CONNECTION)
                    self._connect_once(context)
                    backoff.reset()
                    self._closing.wait(_FIRST_PAUSE_S)
                except Exception as error:  # noqa: BLE001 (kept, logged and tried again)
                    # This frame keeps no name for the error: its traceback would keep the sockets of the attempt.
                    most = self._note(as_out_of_resources(error) or error)
                    self._closing.wait(min(backoff.delay(time.monotonic()), most))
        finally:
            if context is not None:
                context.destroy(0)

    def _connect_once(self, context: zmq.Context[Any]) -> None:
        """Run one connection, from HELLO to its end. Raises if it did not come up."""
        deadlines = self._deadlines
        dealer, reply = self._dial(context, self._hello, CONTROL, self._closing.is_set, self._wait_for_hello)
        self._why.unanswered = None
        self._hello = msgspec.structs.replace(self._hello, replaces=reply.session)
        with contextlib.ExitStack() as undo:
            undo.callback(dealer.close, 0)
            liveness, arena_fd = None, None
            # Paths of a server on another host do not refer to this host.
            if reply.liveness and self._endpoint.startswith("ipc://"):
                liveness, arena_fd = LivenessLink.connect(reply.liveness, reply.session, deadlines.hello_s)
                undo.callback(liveness.close)
                if arena_fd is not None:
                    undo.callback(os.close, arena_fd)
            heartbeat = Heartbeat(deadlines.ping_every_s, deadlines.silent_s, time.monotonic())
            link = Link(
                dealer,
                liveness,
                reply.boot_id,
                heartbeat,
                self._notify,
                gone_s=deadlines.gone_s,
                reports=self.reports,
            )
            link.start()
            undo.pop_all()
        joining = msgspec.structs.replace(self._hello, session=reply.session, replaces=b"")
        bulk = BulkSocket(link, lambda: self._dial(context, joining, BULK, lambda: not link.alive)[0])
        self._link, self._bulk = link, bulk
        if self._closing.is_set():
            link.close()
        try:
            self._on_up(reply, arena_fd)
            self._why.error = None
            self._welcomed = self._was_up = True
            logger.info("connected to the server at %s, boot %s", self._endpoint, reply.boot_id.hex()[:8])
            self._notify()
            link.ended.wait()
        except KVFrameworkError as error:
            if not isinstance(error, (ServerGone, DeadlineExceeded)):
                link.say_goodbye(error)
            raise
        finally:
            up, self._welcomed = self._welcomed, False
            link.close()
            self._link = self._bulk = None
            bulk.close()
        if up:
            self._went_down(link)

    def _dial(
        self,
        context: zmq.Context[Any],
        hello: Hello,
        io_thread: int,
        closing: Callable[[], bool],
        waiting: Callable[[ServerGone], None] = lambda _: None,
    ) -> tuple[Socket, HelloReply]:
        return dial(
            context,
            self._endpoint,
            hello,
            timeout=self._deadlines.hello_s,
            closing=closing,
            keys=self._keys,
            io_thread=io_thread,
            waiting=waiting,
        )

    def _wait_for_hello(self, unanswered: ServerGone) -> None:
        self._why.unanswered = unanswered

    def _went_down(self, link: Link) -> None:
        if not self._closing.is_set():
            self._why.error = link.gone()
            logger.warning("lost the server at %s: %s", self._endpoint, link.gone().fact)
        try:
            self._on_down()
        except Exception as error:
            self._why.error = error
            logger.exception("on_down failed")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _note(self, error: Exception) -> float:
        """Record and log the error of an attempt; return the longest pause before the next one, in seconds."""
        self._why.note(error, quiet=self._closing.is_set())
        return _UNREACHABLE_PAUSE_S if isinstance(error, (ServerGone, OutOfResources)) else _REFUSED_PAUSE_S
