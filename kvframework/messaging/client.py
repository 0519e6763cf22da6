"""Owns `Connection`, the client's end of the wire: it keeps a link to the server up and hands requests to it.

Two threads: the link's I/O thread, and the supervisor thread here, which dials, says HELLO, and calls `on_up` and
`on_down`: these may therefore issue requests themselves. The bulk socket, once used, has an I/O thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import zmq

from kvframework.api import Buffer, Message, MessagingFuture, RequestSpec
from kvframework.errors import DeadlineExceeded, KVFrameworkError, MalformedFrames, ServerGone, UnknownRequest
from kvframework.messaging.bulk import BulkSocket
from kvframework.messaging.curve import LoadedKeys
from kvframework.messaging.dial import BULK, CONTROL, IO_THREADS, dial
from kvframework.messaging.frames_io import Socket
from kvframework.messaging.heartbeat import Heartbeat
from kvframework.messaging.link import Link
from kvframework.messaging.liveness_client import LivenessLink
from kvframework.messaging.pending import RequestFuture
from kvframework.wire.messages import CancelReply, Hello, HelloReply

logger = logging.getLogger(__name__)

State = Literal["up", "suspect", "down"]

TELL_AGAIN_S = 60.0
_FIRST_PAUSE_S = 0.05
_UNREACHABLE_PAUSE_S = 0.25
_REFUSED_PAUSE_S = 2.0
_SLOWEST_HELLO_S = 1.0
_CLOSE_S = 10.0


class Connection:
    """A connection that heals itself. `start()`, then `request(...)` from any thread, then `close()`.

    `on_up(reply, arena_fd)` is called after every successful HELLO, in the supervisor thread; it owns `arena_fd`. Until
    it returns only `urgent` requests go through. If it raises, the connection is dropped and tried again. `on_down()`
    follows every `on_up` that returned. A forked child cannot use its parent's connection and does not disturb it.
    """

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        *,
        table: Mapping[str, RequestSpec],
        on_up: Callable[[HelloReply, int | None], None],
        on_down: Callable[[], None],
        ping_interval_s: float = 0.2,
        ping_timeout_s: float = 0.8,
        keys: LoadedKeys | None = None,
    ) -> None:
        self.last_error: Exception | None = None
        self._unanswered: ServerGone | None = None
        self._tell_again_at = 0.0
        self._endpoint = endpoint
        self._hello = hello
        self._table = table
        self._on_up = on_up
        self._on_down = on_down
        self._ping_interval_s = ping_interval_s
        self._ping_timeout_s = ping_timeout_s
        self._keys = keys
        self._pid = os.getpid()
        self._link: Link | None = None
        self._bulk: BulkSocket | None = None
        self._welcomed = False
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._supervise, name="kvf-connection", daemon=True)

    def start(self) -> None:
        """Starts to connect. Returns at once; to be called once."""
        self._thread.start()

    def wait_up(self, timeout: float) -> bool:
        """Waits until the state is "up", at most `timeout` seconds; whether it is."""
        if os.getpid() != self._pid:
            return False
        with self._changed:
            self._changed.wait_for(lambda: self.state == "up" or self._closing.is_set(), timeout)
        return self.state == "up"

    @property
    def state(self) -> State:
        """ "suspect": a request or PING was not answered in time, and no PING since. "down": there is no server."""
        link = self._link
        if link is None or not self._welcomed or not link.alive or os.getpid() != self._pid:
            return "down"
        return "suspect" if link.suspect else "up"

    @property
    def boot_id(self) -> bytes | None:
        """Of the server that is connected, None if there is none."""
        link = self._link
        return link.boot_id if link is not None and link.alive else None

    @property
    def why_down(self) -> Exception | None:
        """The most telling of what is known: a refusal before silence, silence before that nobody was there."""
        if self.last_error is not None and not isinstance(self.last_error, ServerGone):
            return self.last_error
        return self._unanswered or self.last_error

    def hold(self) -> int | None:
        """A descriptor that, while it is open, keeps the server from taking this process for dead (None over TCP). The
        caller closes it. To be called from within `on_up`."""
        link = self._link
        return link.hold() if link is not None else None

    def request(
        self,
        name: str,
        payload: Message,
        buffers: Sequence[Buffer] = (),
        *,
        timeout: float,
        urgent: bool = False,
        on_late: Callable[[Message], None] | None = None,
    ) -> MessagingFuture[Message]:
        """Sends a request and returns its future; never blocks and never raises.

        The future resolves to the response, with the response's buffers as its `detail`, or fails: with the error that
        the server named, `DeadlineExceeded` after `timeout` seconds (the connection is "suspect" then, until a PING is
        answered), or `ServerGone` (at once if the connection is down, or suspect and the request not `urgent`). Its
        callbacks run in the thread that receives the answer: the I/O thread, or a caller's in `ask`. Big buffers are
        sent without a copy: they must stay unchanged until an answer.
        `cancel()` on it sends CANCEL; the future then resolves with what the server answers to the request.
        `on_late` is called in the I/O thread with a response that comes after the timeout: what it grants is
        nobody's else.
        """
        spec = self._spec(name, buffers)
        if isinstance(spec, KVFrameworkError):
            return MessagingFuture.failed(spec)
        try:
            link = self._usable(urgent)
        except ServerGone as error:
            return MessagingFuture.failed(error)
        return link.submit(spec, payload, buffers, timeout, on_late)

    def ask(
        self,
        name: str,
        payload: Message,
        *,
        timeout: float,
        urgent: bool = False,
        on_late: Callable[[Message], None] | None = None,
    ) -> Message:
        """`request`, waiting for its answer: the calling thread sends and receives by itself, so that no other has to
        wake. Raises what the future would fail with. Not for callbacks of futures."""
        spec = self._spec(name, ())
        if isinstance(spec, KVFrameworkError):
            raise spec
        return self._usable(urgent).ask(spec, payload, timeout, on_late)

    def bulk_request(
        self, name: str, payload: Message, buffers: Sequence[Buffer] = (), *, timeout: float
    ) -> MessagingFuture[Message]:
        """Like `request`, over the session's second socket, which big frames have for themselves. Blocks for a
        handshake when there is none yet. After a timeout there everything under way there fails, and only there.

        A future that has failed does not give the buffers back: ZMQ may still read them, so never write to them again.
        """
        spec = self._spec(name, buffers)
        if isinstance(spec, KVFrameworkError):
            return MessagingFuture.failed(spec)
        bulk = self._bulk
        if bulk is None or self.state == "down":
            return MessagingFuture.failed(ServerGone(f"the connection is {self.state}", where=self._endpoint))
        return bulk.submit(spec, payload, buffers, timeout)

    def cancel(self, future: MessagingFuture[Message]) -> MessagingFuture[Message]:
        """Sends CANCEL for a request made here, also one whose future has failed with `DeadlineExceeded` already.

        The returned future resolves to `CancelReply` once the server touches nothing more for the request, or fails
        with `ServerGone` if the connection that it was made on is no more.
        """
        if not isinstance(future, RequestFuture):  # it never left this process
            return MessagingFuture.resolved(CancelReply(found=False))
        if os.getpid() != self._pid:
            return MessagingFuture.failed(ServerGone("the connection belongs to the parent process"))
        return future.link.cancel(future.request_id)

    def close(self) -> None:
        """Ends the connection: pending futures fail with `ServerGone`, `on_down` is called if it was up, both threads
        are joined (not by themselves, and no longer than a resolver that hangs is worth). Idempotent; does nothing in a
        forked child."""
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

    def _usable(self, urgent: bool) -> Link:
        """The link that a request may go over now. Raises `ServerGone`."""
        link, state = self._link, self.state
        if link is None or not (state == "up" or (urgent and os.getpid() == self._pid)):
            raise ServerGone(f"the connection is {state}", where=self._endpoint)
        return link

    def _spec(self, name: str, buffers: Sequence[Buffer]) -> RequestSpec | KVFrameworkError:
        spec = self._table.get(name)
        if spec is None:
            return UnknownRequest(f"there is no request {name!r}")
        if len(buffers) > spec.buffers:
            return MalformedFrames(f"{len(buffers)} buffers", where=name, available=f"at most {spec.buffers}")
        return spec

    def _supervise(self) -> None:
        context = zmq.Context(IO_THREADS)
        pause = _FIRST_PAUSE_S
        try:
            while not self._closing.is_set():
                try:
                    self._connect_once(context)
                    pause = _FIRST_PAUSE_S
                    self._closing.wait(pause)
                except Exception as error:  # noqa: BLE001 (kept, logged and tried again)
                    self._note(error)
                    most = _UNREACHABLE_PAUSE_S if isinstance(error, ServerGone) else _REFUSED_PAUSE_S
                    self._closing.wait(min(pause, most))
                    pause = min(pause * 2, most)
        finally:
            context.destroy(0)

    def _connect_once(self, context: zmq.Context[Any]) -> None:
        """One connection, from HELLO to its end. Raises if it did not come up."""
        timeout = max(self._ping_timeout_s, _SLOWEST_HELLO_S)
        dealer, reply = self._dial(context, self._hello, CONTROL, self._closing.is_set, self._wait_for_hello)
        self._unanswered = None
        self._hello = msgspec.structs.replace(self._hello, replaces=reply.session)
        with contextlib.ExitStack() as undo:
            undo.callback(dealer.close, 0)
            liveness, arena_fd = None, None
            # What a server on another host names is none of this one's paths.
            if reply.liveness and self._endpoint.startswith("ipc://"):
                liveness, arena_fd = LivenessLink.connect(reply.liveness, reply.session, timeout)
                undo.callback(liveness.close)
                if arena_fd is not None:
                    undo.callback(os.close, arena_fd)
            heartbeat = Heartbeat(self._ping_interval_s, self._ping_timeout_s, time.monotonic())
            link = Link(dealer, liveness, reply.boot_id, heartbeat, self._notify)
            link.start()
            undo.pop_all()
        joining = msgspec.structs.replace(self._hello, session=reply.session, replaces=b"")
        bulk = BulkSocket(link, lambda: self._dial(context, joining, BULK, lambda: not link.alive)[0])
        self._link, self._bulk = link, bulk
        if self._closing.is_set():
            link.close()
        try:
            self._on_up(reply, arena_fd)
            self.last_error = None
            self._welcomed = True
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
            timeout=max(self._ping_timeout_s, _SLOWEST_HELLO_S),
            closing=closing,
            keys=self._keys,
            io_thread=io_thread,
            waiting=waiting,
        )

    def _wait_for_hello(self, unanswered: ServerGone) -> None:
        self._unanswered = unanswered

    def _went_down(self, link: Link) -> None:
        if not self._closing.is_set():
            self.last_error = link.gone()
            logger.warning("lost the server at %s: %s", self._endpoint, link.gone().fact)
        try:
            self._on_down()
        except Exception as error:
            self.last_error = error
            logger.exception("on_down failed")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _note(self, error: Exception) -> None:
        """Logs what keeps the connection from coming up: loudly, unless it is only that nobody serves; again after a
        while, since a cache that is never hit looks like any other."""
        now = time.monotonic()
        if not self._closing.is_set() and (str(error) != str(self.last_error) or now >= self._tell_again_at):
            self._tell_again_at = now + TELL_AGAIN_S
            if isinstance(error, ServerGone):
                logger.info("no server at %s: %s", self._endpoint, error.fact)
            elif isinstance(error, KVFrameworkError):
                logger.error("the server at %s cannot be used: %s", self._endpoint, error)
            else:
                logger.error("connecting to %s failed", self._endpoint, exc_info=error)
        self.last_error = error
        self._unanswered = None
