"""`Link`: one connection to one boot of a server, from HELLO to its end, and the I/O thread that serves it.

The I/O thread owns the liveness socket, the heartbeat and all deadlines except those of callers in `ask`, which send
and receive by themselves. Other callers append to an outbox and wake the I/O thread, which receives the answers that no
caller waits for. Any thread sends what is in the outbox ahead of a message of its own, so that the requests of one
thread keep their order. When the link ends, for any reason, every future of it fails with `ServerGone`; a link is never
used again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq
from msgspec.structs import replace

from kvframework.api.futures import Future
from kvframework.api.requests import Buffer, Message, RequestSpec
from kvframework.errors import (
    HelloRequired,
    InvalidPayload,
    KVFrameworkError,
    ProtocolError,
    ServerGone,
)
from kvframework.logs.limit import LogLimit
from kvframework.messaging import frames_io
from kvframework.messaging.client.liveness import Heartbeat, LivenessLink, Silence
from kvframework.messaging.client.pending import Answer, LateAnswers, Outgoing, Pending
from kvframework.messaging.client.reported import FreedTickets, Losses, ShortPrompts
from kvframework.messaging.frames_io import SharedDealer, milliseconds
from kvframework.messaging.polling import Wakeup
from kvframework.wire.frames import ERROR_TYPE, NO_ANSWER, Envelope, ErrorPayload, decode, error_from, join, split
from kvframework.wire.messages import Cancel, Goodbye, Ping, Pong
from kvframework.wire.protocol import REQUESTS, ROOM_REQUESTS

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

_MESSAGES_PER_ROUND = 64
_LAST_RESORT_S = 1.0  # for a thread that is about to resolve a future, and is being held up
_AFTER_THE_SERVER_S = 1.0  # the server's own deadline passes first
_PING = REQUESTS["PING"]
_CANCEL = REQUESTS["CANCEL"]
_GOODBYE = REQUESTS["GOODBYE"]
_GOODBYE_S = 0.2


class _EndOfLink(Exception):
    """Leaves the I/O loop; its argument is the reason."""


class Link:
    """One connection. The I/O thread calls `changed()` when `suspect` has changed and when the link has ended."""

    def __init__(
        self,
        dealer: frames_io.Socket,
        liveness: LivenessLink | None,
        boot_id: bytes,
        heartbeat: Heartbeat,
        changed: Callable[[], None],
        *,
        gone_s: float = math.inf,
        losses: Losses | None = None,
        short: ShortPrompts | None = None,
        freed: FreedTickets | None = None,
    ) -> None:
        self.boot_id = boot_id
        self._silence = Silence(changed)
        self._prompt = True
        self._gone_s = gone_s
        self._losses = losses or Losses()
        self._losses.begin()
        self._short = short or ShortPrompts()
        self._short.begin()
        self._freed = freed or FreedTickets()
        self._freed.begin()
        self.reason: KVFrameworkError | None = None
        self.ended = threading.Event()
        self._dealer = SharedDealer(dealer)
        self._liveness = liveness
        self._heartbeat = heartbeat
        self._changed = changed
        self._clock = time.monotonic
        self._ids = itertools.count(int.from_bytes(os.urandom(7), "little") + 1)
        # Guards _closed and the way into _outbox. Reentrant: a signal's handler may close.
        self._lock = threading.RLock()
        self._closed = False
        # An item stays in the outbox until it is sent; `_sending` guards the way out.
        self._outbox: deque[Outgoing] = deque()
        self._sending = threading.RLock()
        self._pending = Pending()
        self._wakeup = Wakeup()
        # Work that callers leave to the I/O thread: answers without a caller, and requests that were given up.
        self._handed_over: deque[Envelope | Outgoing] = deque()
        self._late = LateAnswers()
        # The PINGs that are not answered.
        self._pings: dict[int, Ping] = {}
        self._callers = self._dealer.watch(zmq.Poller())
        self._within: set[int] = set()  # threads that send, or wait in `ask`
        self._thread = threading.Thread(target=self._run, name="kvf-link", daemon=True)

    @property
    def alive(self) -> bool:
        """False once the link has ended or is about to."""
        return not self._closed

    @property
    def suspect(self) -> bool:
        """Whether the server has left a request unanswered."""
        return self._silence.suspect

    def start(self) -> None:
        """Start the I/O thread, which from now on owns the sockets. Raises `RuntimeError` if the process gets no
        thread, and keeps no descriptor then; the liveness socket is still the caller's."""
        try:
            self._thread.start()
        except RuntimeError:
            self._dealer.close()
            self._wakeup.close()
            raise

    def runs_here(self) -> bool:
        """Whether this is the I/O thread, or a caller within a request (its callbacks, a signal's handler): the link
        may not end before it has left."""
        return threading.current_thread() is self._thread or threading.get_ident() in self._within

    def submit(
        self,
        spec: RequestSpec,
        payload: Message,
        buffers: Sequence[Buffer],
        timeout: float,
        on_late: Callable[[Message], None] | None = None,
    ) -> Future[Answer]:
        """Send a request, from any thread, without blocking. A request that cannot be sent yields a failed future."""
        try:
            item = Outgoing.of(self.cancel, next(self._ids), spec, payload, buffers, timeout, on_late)
        except KVFrameworkError as error:
            return Future.failed(error.with_traceback(None))
        entered = self._enter()
        try:
            with self._lock:
                if self._closed:
                    return Future.failed(self.gone())
                self._outbox.append(item)
            self._wakeup.signal()
        finally:
            self._leave(entered)
        return item.future

    def ask(
        self, spec: RequestSpec, payload: Message, timeout: float, on_late: Callable[[Message], None] | None = None
    ) -> Message:
        """Send a request and wait for its answer. Raises the error with which the future of `submit` would fail. Not
        for the I/O thread, nor for callbacks of futures."""
        item = Outgoing.of(self.cancel, next(self._ids), spec, payload, (), timeout, on_late)
        self._wait_here(item, item.deadline)
        try:
            return item.future.result(_LAST_RESORT_S).payload
        finally:
            # An error's traceback refers to this frame: a cycle would keep the caller's buffers until it is collected.
            del item

    def begin(
        self,
        spec: RequestSpec,
        payload: Message,
        timeout: float,
        turn: float,
        on_late: Callable[[Message], None] | None = None,
    ) -> Future[Answer]:
        """Like `ask` for at most `turn` seconds; a future that is still pending then continues as that of `submit`.
        Does not wait while the server takes longer than such a turn, nor in callbacks of futures."""
        if turn <= 0 or self.suspect or not self._prompt or self.runs_here():
            return self.submit(spec, payload, (), timeout, on_late)
        try:
            item = Outgoing.of(self.cancel, next(self._ids), spec, payload, (), timeout, on_late)
        except KVFrameworkError as error:
            return Future.failed(error.with_traceback(None))
        self._wait_here(item, min(item.deadline, self._clock() + turn))
        return item.future

    def post(self, spec: RequestSpec, payload: Message) -> bool:
        """Send a request that gets no answer, in the calling thread; False if it cannot be sent now. Never blocks."""
        frames = join(NO_ANSWER, spec.name, payload)
        entered = self._enter()
        try:
            self._send_outbox()
            self._dealer.send(frames)
        except zmq.ZMQError:
            return False
        except BaseException as error:  # a signal's handler raised: half a message may have been sent
            self._stop(ServerGone(f"{type(error).__name__} interrupted a message"))
            raise
        finally:
            self._leave(entered)
        return True

    def silent_s(self) -> float:
        """See `Silence.seconds`."""
        return self._silence.seconds()

    def cancel(self, request_id: int) -> Future[Answer]:
        """Send CANCEL; its answer comes once the server no longer touches anything for that request."""
        return self.submit(_CANCEL, Cancel(request_id), (), _CANCEL.deadline_s + _AFTER_THE_SERVER_S)

    def liveness_fd(self) -> int | None:
        """See `Connection.liveness_fd`."""
        return self._liveness.duplicate() if self._liveness is not None else None

    def say_goodbye(self, why: KVFrameworkError | None = None) -> None:
        """Report to the server what it could not notice otherwise: losses, the end, and the reason if this client
        cannot use the server. Waits for a moment. Not in the I/O thread."""
        ping = self._ping()
        if ping != Ping():
            with contextlib.suppress(KVFrameworkError):
                self.submit(_PING, ping, (), _GOODBYE_S).result(2 * _GOODBYE_S)
                self._acknowledged(ping)
        if self._liveness is None or why is not None:
            goodbye = Goodbye(why.code, why.fact) if why is not None else Goodbye()
            with contextlib.suppress(KVFrameworkError):
                self.submit(_GOODBYE, goodbye, (), _GOODBYE_S).result(2 * _GOODBYE_S)

    def close(self) -> None:
        """End the link and wait for its thread, unless called by it. Idempotent."""
        with self._lock:
            self._closed = True
        self._wakeup.signal()
        if not self.runs_here():
            self._thread.join()

    def gone(self) -> KVFrameworkError:
        """Return the error with which requests of an ended link fail."""
        return ServerGone(self.reason.fact if self.reason else "the connection was closed")

    # in the thread of a waiting caller

    def _wait_here(self, item: Outgoing, until: float) -> None:
        """Send the request and wait. Afterwards the future is resolved, or pending and served by the I/O thread, if
        `until` is before its deadline."""
        entered, given_on = self._enter(), False
        try:
            self._exchange(item, until)
            if not item.future.query():
                if until < item.deadline:
                    self._prompt = False
                    given_on = True
                    self._pending.watch(item)
                    self._wakeup.signal()
                else:
                    self._give_up(item)
        except BaseException as error:
            # A signal's handler raised. Outside of a wait, half a message may have been sent or received.
            self._dealer.follow()
            if not item.future.resting:
                self._stop(ServerGone(f"{type(error).__name__} interrupted a message"))
            raise
        finally:
            self._leave(entered)
            if not given_on and self._pending.lapse(item, self._handed_over):
                self._wakeup.signal()

    def _exchange(self, item: Outgoing, until: float) -> None:
        """Send the request and receive, until its future is resolved or that time."""
        if self._closed or not self._pending.add(item, watched=False):
            item.resolve(self.gone())
            return
        try:
            self._send_outbox()
            self._send(item)
        except zmq.ZMQError as error:
            if self._pending.take(item.request_id) is not None:
                item.resolve(self._full(item) if isinstance(error, zmq.Again) else self.gone())
            return
        while not item.future.query():
            if self._dealer.lead():
                try:
                    self._receive_until(item, until)
                finally:
                    self._dealer.follow()
                    if self._pending:
                        self._wakeup.signal()  # no thread receives the answers that others wait for
            else:
                item.future.rest(until - self._clock())
                if self._clock() >= until:
                    self._receive()
            if self._clock() >= until:
                return

    def _receive_until(self, item: Outgoing, until: float) -> None:
        """Receive as the leader, until the item is resolved or that time."""
        while not item.future.query():
            item.future.resting = True
            self._dealer.wait(until, self._callers)
            item.future.resting = False
            self._receive(leading=True)
            if self._clock() >= until:
                return

    def _give_up(self, item: Outgoing) -> None:
        if self._pending.lapse(item, self._handed_over):
            self._silence.begin(item.deadline - item.timeout)
            self._wakeup.signal()
        else:
            item.future.rest(_LAST_RESORT_S)  # another thread is about to resolve it
        item.resolve(item.unanswered())

    # in any thread

    def _enter(self) -> bool:
        """Note that this thread is within a request; return whether it was not yet."""
        caller = threading.get_ident()
        if caller in self._within:
            return False
        self._within.add(caller)
        return True

    def _leave(self, entered: bool) -> None:
        if entered:
            self._within.discard(threading.get_ident())

    def _send_outbox(self) -> None:
        """Send what `submit` has left, oldest first. Raises `zmq.ZMQError` once the link has ended."""
        if not self._outbox:
            return
        refused = []
        with self._sending:
            while self._outbox:
                item = self._outbox[0]
                if not self._pending.add(item, watched=True):
                    break  # the link's end resolves it
                try:
                    self._send(item)
                except zmq.Again:
                    refused.append(item)
                self._outbox.popleft()
        for item in refused:
            if self._pending.take(item.request_id) is not None:
                item.resolve(self._full(item))

    def _send(self, item: Outgoing) -> None:
        """Send a request. One that needs room follows the tickets that were freed before it. Raises `zmq.ZMQError`."""
        while item.spec.name in ROOM_REQUESTS and (free := self._freed.take()):
            try:
                self._dealer.send(join(next(self._ids), _PING.name, Ping(free=free)))
            except zmq.ZMQError:
                self._freed.add(free)
                raise
        self._dealer.send(item.frames)

    def _receive(self, *, leading: bool = False) -> None:
        messages = self._dealer.receive(_MESSAGES_PER_ROUND)
        if messages:
            self._silence.heard_at = self._clock()
            self._prompt = True
        for frames in messages:
            try:
                envelope = split(frames)
            except ProtocolError as error:
                logger.error("dropped a message of the server: %s", error)
                continue
            item = self._pending.take(envelope.request_id)
            if item is None:
                self._handed_over.append(envelope)
                self._wakeup.signal()
            else:
                self._on_answer(item, envelope)
        if messages and not leading:
            self._dealer.interrupt()

    # in the I/O thread

    def _run(self) -> None:
        try:
            idle, leading = self._poller(), self._dealer.watch(self._poller())
            while not self._closed:
                self._round(idle, leading)
        except _EndOfLink as end:
            self.reason = end.args[0]
        except Exception as error:
            logger.exception("the connection's I/O thread failed")
            self.reason = ServerGone(f"the connection failed: {error}")
        finally:
            self._end()

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wakeup.fd, zmq.POLLIN)
        if self._liveness is not None:
            poller.register(self._liveness.fd, zmq.POLLIN)
        return poller

    def _round(self, idle: zmq.Poller, leading: zmq.Poller) -> None:
        wake_at = min(self._heartbeat.next_at(), self._pending.next_deadline() or math.inf)
        leads = bool(self._pending or self._pings) and self._dealer.lead()
        try:
            if leads:
                ready = self._dealer.wait(wake_at, leading)
                self._receive(leading=True)
            else:
                ready = {fd for fd, _ in idle.poll(milliseconds(wake_at))}
        finally:
            if leads:
                self._dealer.follow()
        if self._wakeup.fd in ready:
            self._wakeup.drain()
        self._send_outbox()
        self._take_over()
        if self._liveness is not None and self._liveness.fd in ready:
            self._receive()  # messages that the server sent before its end
            raise _EndOfLink(ServerGone("the server has ended"))
        now = self._clock()
        if now >= wake_at:
            self._receive()  # this process may have been stopped: answers that have arrived by now were not late
            self._take_over()
            self._expire(now)
            self._beat(now)

    def _take_over(self) -> None:
        for _ in range(len(self._handed_over)):
            what = self._handed_over.popleft()
            if isinstance(what, Outgoing):
                self._heartbeat.ask_now()
                self._late.expect(what)
            elif what.request_id in self._pings:
                self._on_pong(what)
            else:
                self._late.give_back(what)

    def _full(self, item: Outgoing) -> KVFrameworkError:
        self._silence.begin()
        return ServerGone("the server accepts no more messages", where=item.spec.name)

    def _on_answer(self, item: Outgoing, envelope: Envelope) -> None:
        try:
            item.resolve(item.answer(envelope))
        except KVFrameworkError as error:
            # Its traceback refers to the caller's frames: a cycle would keep the arena mapped until it is collected.
            error.with_traceback(None)
            if isinstance(error, HelloRequired):
                self._stop(error)  # before the caller, who may retry at once, gets the error
            item.resolve(error)
        finally:
            if not item.future.query():  # a signal interrupted it
                item.resolve(self.gone())

    def _stop(self, reason: KVFrameworkError) -> None:
        """Make the I/O thread end the link."""
        self.reason = reason
        with self._lock:
            self._closed = True
        self._wakeup.signal()

    def _on_pong(self, envelope: Envelope) -> None:
        """Any answer shows that the server's loop is alive; a PONG also identifies its boot."""
        ping = self._pings.pop(envelope.request_id)
        self._pings.clear()
        self._heartbeat.answered()
        try:
            if envelope.type == ERROR_TYPE:
                error = error_from(decode(envelope.payload, ErrorPayload, where=_PING.name))
                if isinstance(error, HelloRequired):
                    raise _EndOfLink(error)
            elif decode(envelope.payload, Pong, where=_PING.name).boot_id != self.boot_id:
                raise _EndOfLink(ServerGone("the server was restarted"))
            else:
                self._acknowledged(ping)
        except InvalidPayload as error:
            raise _EndOfLink(error) from None
        self._silence.end()

    def _ping(self) -> Ping:
        """Return a PING with all that its server does not know yet."""
        return Ping(self._losses.report(), *self._short.report())

    def _acknowledged(self, ping: Ping) -> None:
        """Record that the server has answered a PING."""
        self._losses.acknowledged(ping.lost)
        self._short.acknowledged(ping.short_count)

    def _expire(self, now: float) -> None:
        for item in self._pending.due(now):
            self._heartbeat.ask_now()
            self._late.expect(item)
            self._silence.begin(item.deadline - item.timeout)
            item.resolve(item.unanswered())

    def _beat(self, now: float) -> None:
        self._silence.log(now)
        if self._heartbeat.overdue(now):
            silence = self._heartbeat.silence(now)
            if self._liveness is None and silence >= self._gone_s:
                raise _EndOfLink(ServerGone(f"the server has answered no PING for {silence:.0f} s"))
            self._silence.begin(now - silence)  # silence is not death
        if not self._heartbeat.due(now):
            return
        request_id = next(self._ids)
        try:
            ping = self._pings[request_id] = self._ping()
            free = self._freed.take()
            self._send_outbox()  # requests that name those tickets
            self._dealer.send(join(request_id, _PING.name, replace(ping, free=free) if free else ping))
        except zmq.Again:
            self._freed.add(free)
            self._pings.pop(request_id, None)
            if self._heartbeat.overdue(now):
                raise _EndOfLink(ServerGone("the connection is broken")) from None
            self._heartbeat.sent(now)
            return
        self._heartbeat.sent(now)

    def _end(self) -> None:
        with self._lock:
            self._closed = True
        unanswered = self._pending.close()
        with self._sending:
            unanswered += self._outbox
            self._outbox.clear()
        for item in unanswered:
            item.resolve(self.gone())
        self._dealer.close()
        if self._liveness is not None:
            self._liveness.close()
        self._wakeup.close()
        self.ended.set()
        self._changed()
