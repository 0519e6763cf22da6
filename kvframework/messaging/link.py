"""Owns `Link`: one connection to one boot of a server, from HELLO to its end, and the I/O thread that serves it.

The I/O thread owns the DEALER and the liveness socket. Callers append to an outbox and wake it. When the link ends, for
whatever reason, every future of it fails with `ServerGone`; a link is never used again.
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
from typing import Any, NamedTuple

import zmq

from kvframework.api import Buffer, Message, MessagingFuture, RequestSpec
from kvframework.errors import (
    DeadlineExceeded,
    HelloRequired,
    InvalidPayload,
    KVFrameworkError,
    ProtocolError,
    ServerGone,
)
from kvframework.log_limit import LogLimit
from kvframework.messaging import frames_io
from kvframework.messaging.deadlines import Deadlines
from kvframework.messaging.heartbeat import Heartbeat
from kvframework.messaging.liveness_client import LivenessLink
from kvframework.messaging.wakeup import Wakeup
from kvframework.wire.frames import ERROR_TYPE, Envelope, ErrorPayload, decode, error_from, join, split
from kvframework.wire.messages import Cancel, Empty, Goodbye, Pong
from kvframework.wire.table import REQUESTS

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

_MESSAGES_PER_ROUND = 64
_MAX_LATE = 4096
_AFTER_THE_SERVER_S = 1.0  # the server's own deadline speaks first
_PING = REQUESTS["PING"]
_CANCEL = REQUESTS["CANCEL"]
_GOODBYE = REQUESTS["GOODBYE"]
_GOODBYE_S = 0.2


class RequestFuture(MessagingFuture[Message]):
    """The future of a request that was sent. `cancel()` asks the server, which answers the request as always."""

    __slots__ = ("link", "request_id")

    def __init__(self, link: Link, request_id: int) -> None:
        super().__init__()
        self.link = link
        self.request_id = request_id

    def cancel(self) -> None:
        if not self.query():
            self.link.cancel(self.request_id)


class _Outgoing(NamedTuple):
    request_id: int
    frames: list[Any]
    spec: RequestSpec
    future: RequestFuture
    timeout: float
    deadline: float
    on_late: Callable[[Message], None] | None = None


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
    ) -> None:
        self.boot_id = boot_id
        self.suspect = False
        self._suspect_since = 0.0
        self.reason: KVFrameworkError | None = None
        self.ended = threading.Event()
        self._dealer = dealer
        self._liveness = liveness
        self._heartbeat = heartbeat
        self._changed = changed
        self._clock = time.monotonic
        self._ids = itertools.count(int.from_bytes(os.urandom(7), "little") + 1)
        self._lock = threading.Lock()  # guards _closed and the way into _outbox
        self._closed = False
        self._outbox: deque[_Outgoing] = deque()
        self._pending: dict[int, _Outgoing] = {}
        self._late: dict[int, _Outgoing] = {}
        self._pings: set[int] = set()
        self._deadlines: Deadlines[int] = Deadlines()
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="kvf-link", daemon=True)

    @property
    def alive(self) -> bool:
        """False once the link has ended or is about to."""
        return not self._closed

    def start(self) -> None:
        """Starts the I/O thread, which from now on owns the sockets."""
        self._thread.start()

    def runs_here(self) -> bool:
        """True in the I/O thread."""
        return threading.current_thread() is self._thread

    def submit(
        self,
        spec: RequestSpec,
        payload: Message,
        buffers: Sequence[Buffer],
        timeout: float,
        on_late: Callable[[Message], None] | None = None,
    ) -> MessagingFuture[Message]:
        """Sends a request, from any thread, without blocking. What cannot be sent comes back as a failed future."""
        request_id = next(self._ids)
        try:
            frames = frames_io.outgoing(join(request_id, spec.name, payload, buffers))
        except KVFrameworkError as error:
            return MessagingFuture.failed(error)
        except (TypeError, ValueError, OverflowError) as error:
            return MessagingFuture.failed(InvalidPayload(str(error), where=spec.name))
        future = RequestFuture(self, request_id)
        item = _Outgoing(request_id, frames, spec, future, timeout, self._clock() + timeout, on_late)
        with self._lock:
            if self._closed:
                return MessagingFuture.failed(self.gone())
            self._outbox.append(item)
        self._wakeup.signal()
        return future

    def cancel(self, request_id: int) -> MessagingFuture[Message]:
        """Sends CANCEL; its answer comes once the server touches nothing more for that request."""
        return self.submit(_CANCEL, Cancel(request_id), (), _CANCEL.deadline_s + _AFTER_THE_SERVER_S)

    def hold(self) -> int | None:
        """See `Connection.hold`."""
        return self._liveness.duplicate() if self._liveness is not None else None

    def say_goodbye(self, why: KVFrameworkError | None = None) -> None:
        """Tells a server what it could not notice otherwise: the end, and why it is of no use. Waits for a moment. Not
        in the I/O thread."""
        if self._liveness is None or why is not None:
            goodbye = Goodbye(why.code, why.fact) if why is not None else Goodbye()
            with contextlib.suppress(KVFrameworkError):
                self.submit(_GOODBYE, goodbye, (), _GOODBYE_S).result(2 * _GOODBYE_S)

    def close(self) -> None:
        """Ends the link and waits for its thread, unless called by it. Idempotent."""
        with self._lock:
            self._closed = True
        self._wakeup.signal()
        if not self.runs_here():
            self._thread.join()

    def gone(self) -> KVFrameworkError:
        """What requests of an ended link fail with."""
        return ServerGone(self.reason.fact if self.reason else "the connection was closed")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        if self._liveness is not None:
            poller.register(self._liveness.fd, zmq.POLLIN)
        try:
            while not self._closed:
                self._round(poller)
        except _EndOfLink as end:
            self.reason = end.args[0]
        except Exception as error:
            logger.exception("the connection's I/O thread failed")
            self.reason = ServerGone(f"the connection failed: {error}")
        finally:
            self._end()

    def _round(self, poller: zmq.Poller) -> None:
        wake_at = min(self._heartbeat.next_at(), self._deadlines.next() or math.inf)
        ready = dict(poller.poll(max(0, math.ceil((wake_at - self._clock()) * 1000))))
        if self._wakeup.fd in ready:
            self._wakeup.drain()
        self._send_outbox()
        if self._dealer in ready:
            self._receive()
        if self._liveness is not None and self._liveness.fd in ready:
            self._receive()  # what the server said before it went
            raise _EndOfLink(ServerGone("the server is gone"))
        now = self._clock()
        if now >= wake_at:
            self._receive()  # this process may have been stopped: what is here by now was not late
            self._expire(now)
            self._beat(now)

    def _send_outbox(self) -> None:
        for _ in range(len(self._outbox)):
            item = self._outbox.popleft()
            try:
                frames_io.send(self._dealer, item.frames)
            except zmq.Again:
                self._resolve(item, ServerGone("the server takes no more messages", where=item.spec.name))
                self._set_suspect(True)
                continue
            self._pending[item.request_id] = item
            self._deadlines.set(item.request_id, item.deadline)

    def _receive(self) -> None:
        for _ in range(_MESSAGES_PER_ROUND):
            frames = frames_io.receive(self._dealer, frames_io.HEAD_FRAMES)
            if frames is None:
                return
            try:
                envelope = split(frames)
            except ProtocolError as error:
                logger.error("dropped a message of the server: %s", error)
                continue
            if envelope.request_id in self._pings:
                self._on_pong(envelope)
            elif (item := self._pending.pop(envelope.request_id, None)) is not None:
                self._deadlines.discard(envelope.request_id)
                self._on_answer(item, envelope)
            elif (item := self._late.pop(envelope.request_id, None)) is not None:
                self._on_late_answer(item, envelope)

    def _on_answer(self, item: _Outgoing, envelope: Envelope) -> None:
        spec = item.spec
        try:
            if envelope.type == ERROR_TYPE:
                raise error_from(decode(envelope.payload, ErrorPayload, where=spec.name))
            if envelope.type != spec.name:
                raise ProtocolError(f"the server answered with {envelope.type!r}", where=spec.name)
            answer = decode(envelope.payload, spec.response, where=f"response of {spec.name}")
        except KVFrameworkError as error:
            self._resolve(item, error)
            if isinstance(error, HelloRequired):
                raise _EndOfLink(error) from None
            return
        self._resolve(item, answer, envelope.buffers)

    def _on_late_answer(self, item: _Outgoing, envelope: Envelope) -> None:
        """Its caller has given up; what the server has granted is given back."""
        if item.on_late is None or envelope.type != item.spec.name:
            return
        try:
            item.on_late(decode(envelope.payload, item.spec.response, where=f"response of {item.spec.name}"))
        except Exception:
            logger.exception("a late answer to %s could not be given back", item.spec.name)

    def _on_pong(self, envelope: Envelope) -> None:
        """Any answer shows that the server's loop is alive; a PONG also which boot of it."""
        self._pings.clear()
        self._heartbeat.answered()
        try:
            if envelope.type == ERROR_TYPE:
                error = error_from(decode(envelope.payload, ErrorPayload, where=_PING.name))
                if isinstance(error, HelloRequired):
                    raise _EndOfLink(error)
            elif decode(envelope.payload, Pong, where=_PING.name).boot_id != self.boot_id:
                raise _EndOfLink(ServerGone("the server was started anew"))
        except InvalidPayload as error:
            raise _EndOfLink(error) from None
        self._set_suspect(False)

    def _expire(self, now: float) -> None:
        for request_id in self._deadlines.due(now):
            item = self._pending.pop(request_id)
            if item.on_late is not None:
                self._late[request_id] = item
                if len(self._late) > _MAX_LATE:
                    del self._late[next(iter(self._late))]
            self._set_suspect(True)
            self._heartbeat.ask_now()
            self._resolve(item, DeadlineExceeded(f"no answer within {item.timeout} s", where=item.spec.name))

    def _beat(self, now: float) -> None:
        if self._heartbeat.overdue(now):
            if self._liveness is None:
                raise _EndOfLink(ServerGone("the server does not answer PING"))
            self._set_suspect(True)  # silence is not death: its liveness socket still stands
        if not self._heartbeat.due(now):
            return
        request_id = next(self._ids)
        try:
            frames_io.send(self._dealer, join(request_id, _PING.name, Empty()))
        except zmq.Again:
            if self._heartbeat.overdue(now):
                raise _EndOfLink(ServerGone("the connection is broken")) from None
            self._heartbeat.sent(now)
            return
        self._pings.add(request_id)
        self._heartbeat.sent(now)

    def _set_suspect(self, suspect: bool) -> None:
        if self.suspect == suspect:
            return
        self.suspect = suspect
        if suspect:
            self._suspect_since = self._clock()
            logger.warning("the server does not answer: every lookup is a miss until it does")
        else:
            logger.info("the server answers again after %.1f s", self._clock() - self._suspect_since)
        self._changed()

    def _resolve(self, item: _Outgoing, outcome: Message | KVFrameworkError, detail: object = None) -> None:
        try:
            if isinstance(outcome, KVFrameworkError):
                item.future.set_exception(outcome)
            else:
                item.future.set_result(outcome, detail)
        except Exception:
            logger.exception("a callback of a %s future failed", item.spec.name)

    def _end(self) -> None:
        with self._lock:
            self._closed = True
        self._dealer.close(0)
        if self._liveness is not None:
            self._liveness.close()
        for item in [*self._pending.values(), *self._outbox]:
            self._resolve(item, self.gone())
        self._pending.clear()
        self._outbox.clear()
        self.ended.set()
        self._changed()
