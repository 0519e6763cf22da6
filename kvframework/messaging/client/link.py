"""`Link`: one connection to one boot of a server, from HELLO to its end, and the I/O thread that serves it.

The I/O thread owns the liveness socket, the PINGs and all deadlines except those of callers that wait, which send and
receive by themselves. Other callers append to an outbox and wake the I/O thread, which receives the answers that no
caller waits for. Any thread sends what is in the outbox ahead of a message of its own, so that the requests of one
thread keep their order. When the link ends, for any reason, every future of it fails with `ServerGone`; a link is never
used again. A signal's handler that raises in a caller ends it: half a message may be under way."""

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
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import zmq
from msgspec.structs import replace

from kvframework import errors
from kvframework.api.futures import Future, Promise
from kvframework.api.requests import Buffer, Message, RequestSpec
from kvframework.logs.limit import LogLimit
from kvframework.messaging import frames_io
from kvframework.messaging.client.liveness import LivenessLink, Reports, Watch
from kvframework.messaging.frames_io import SharedDealer, milliseconds
from kvframework.messaging.polling import Deadlines, Wakeup
from kvframework.wire.frames import ERROR_TYPE, NO_ANSWER, Envelope, ErrorPayload, decode, error_from, join, split
from kvframework.wire.messages import Cancel, Goodbye, Ping
from kvframework.wire.protocol import HINT, REQUESTS, ROOM_REQUESTS

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

_MESSAGES_PER_ROUND = 64
_MAX_LATE = 4096
_LAST_RESORT_S = 1.0  # for a thread that is about to resolve a future, and is being held up
_AFTER_THE_SERVER_S = 1.0  # the server's own deadline passes first
_PING = REQUESTS["PING"]
_CANCEL = REQUESTS["CANCEL"]
_GOODBYE = REQUESTS["GOODBYE"]
_GOODBYE_S = 0.2

OnLate = Callable[[Message], None]


class Answer(NamedTuple):
    """What the server answered: the response, and the raw buffers behind it."""

    payload: Message
    buffers: Sequence[memoryview] = ()


class Request(Promise[Answer]):
    """A request and the future of its answer; `deadline` is on the monotonic clock. `on_late` receives an answer that
    arrives after it. `cancel()` asks the server, which answers the request as always."""

    __slots__ = ("_link", "deadline", "frames", "late", "on_late", "request_id", "spec", "timeout")

    def __init__(
        self, link: Link, request_id: int, frames: list[Any], spec: RequestSpec, timeout: float, on_late: OnLate | None
    ) -> None:
        super().__init__()
        self.request_id = request_id
        self.frames = frames
        self.spec = spec
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.on_late = on_late
        self.late = False  # whether it was given up
        self._link = link

    def cancel(self) -> None:
        if not self.query():
            self.cancelled()

    def cancelled(self) -> Future[Answer]:
        return self._link.begin(_CANCEL, Cancel(self.request_id), timeout=_CANCEL.deadline_s + _AFTER_THE_SERVER_S)

    def answer(self, envelope: Envelope) -> Answer:
        """Return the server's response. Raises the error that it named, and `ProtocolError` for another reply."""
        if envelope.type == ERROR_TYPE:
            raise error_from(decode(envelope.payload, ErrorPayload, where=self.spec.name))
        if envelope.type != self.spec.name:
            raise errors.ProtocolError(f"the server answered with {envelope.type!r}", where=self.spec.name)
        response = decode(envelope.payload, self.spec.response, where=f"response of {self.spec.name}")
        return Answer(response, envelope.buffers)

    def resolve(self, outcome: Answer | errors.KVFrameworkError) -> None:
        """Resolve it, in the calling thread. A callback that fails is logged."""
        try:
            if isinstance(outcome, errors.KVFrameworkError):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)
        except Exception:
            logger.exception("a callback of a %s future failed", self.spec.name)

    def expire(self) -> None:
        self.resolve(errors.DeadlineExceeded(f"no answer within {self.timeout:.4g} s", where=self.spec.name, hint=HINT))


class Pending:
    """The unanswered requests, and the latest given up with an `on_late`. Who removes one resolves it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: dict[int, Request] = {}
        self._late: dict[int, Request] = {}
        self._deadlines: Deadlines[int] = Deadlines()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Request, *, watched: bool) -> bool:
        """Add a request, False after `close`. `watched`: `due` returns it at its deadline."""
        with self._lock:
            if self._closed:
                return False
            self._items[item.request_id] = item
            if watched:
                self._deadlines.set(item.request_id, item.deadline)
            return True

    def watch(self, item: Request) -> None:
        """Leave the deadline of a request to `due`, since its caller no longer waits."""
        with self._lock:
            if item.request_id in self._items:
                self._deadlines.set(item.request_id, item.deadline)

    def take(self, request_id: int) -> Request | None:
        """Remove a request, also one that is `late`; None if another thread has taken it."""
        with self._lock:
            self._deadlines.discard(request_id)
            return self._items.pop(request_id, None) or self._late.pop(request_id, None)

    def give_up(self, item: Request) -> bool:
        """Remove a request whose caller's deadline has passed; False if another thread has taken it."""
        with self._lock:
            if self._items.pop(item.request_id, None) is None:
                return False
            self._keep_late(item)
            return True

    def next_deadline(self) -> float | None:
        with self._lock:
            return self._deadlines.next()

    def due(self, now: float) -> list[Request]:
        """Give up and return the watched requests whose deadline has passed."""
        with self._lock:
            items = [self._items.pop(request_id) for request_id in self._deadlines.due(now)]
            for item in items:
                self._keep_late(item)
            return items

    def close(self) -> list[Request]:
        """Remove and return all requests; later ones are refused."""
        with self._lock:
            self._closed = True
            items = list(self._items.values())
            self._items.clear()
            return items

    def _keep_late(self, item: Request) -> None:
        item.late = True
        if item.on_late is not None:
            self._late[item.request_id] = item
            if len(self._late) > _MAX_LATE:
                del self._late[next(iter(self._late))]


@dataclass(eq=False, repr=False)
class Link:
    """One connection. `watch.changed()` is called when the server's silence has changed and when the link has ended."""

    dealer: InitVar[frames_io.Socket]
    liveness: LivenessLink | None
    boot_id: bytes
    watch: Watch
    gone_s: float = math.inf
    reports: Reports = field(default_factory=Reports)

    def __post_init__(self, dealer: frames_io.Socket) -> None:
        self.reason: errors.KVFrameworkError | None = None
        self.ended = threading.Event()
        # Until when the server may have released pins by an END_SESSION of this session, of the monotonic clock.
        self.released_at = -math.inf
        self._prompt = True
        self.reports.begin()
        self._dealer = SharedDealer(dealer)
        self._clock = time.monotonic
        self._ids = itertools.count(int.from_bytes(os.urandom(7), "little") + 1)
        # Guards _closed and the way into _outbox. Reentrant: a signal's handler may close.
        self._lock = threading.RLock()
        self._closed = False
        # An item stays in the outbox until it is sent; `_sending` guards the way out, and each END_SESSION.
        self._outbox: deque[Request] = deque()
        self._sending = threading.RLock()
        self._pending = Pending()
        self._wakeup = Wakeup()
        self._callers = self._dealer.watch(zmq.Poller())
        self._within: set[int] = set()  # threads that send, or wait in `ask`
        self._thread = threading.Thread(target=self._run, name="kvf-link", daemon=True)

    @property
    def alive(self) -> bool:
        """False once the link has ended or is about to."""
        return not self._closed

    def start(self) -> None:
        """Start the I/O thread, which owns the sockets then. Raises `RuntimeError`: liveness stays the caller's."""
        try:
            self._thread.start()
        except RuntimeError:
            self._dealer.close()
            self._wakeup.close()
            raise

    def runs_here(self) -> bool:
        """Whether this is the I/O thread, or a caller within a request: the link may not end before it has left."""
        return threading.current_thread() is self._thread or threading.get_ident() in self._within

    def ask(self, spec: RequestSpec, payload: Message, *, timeout: float, on_late: OnLate | None = None) -> Message:
        item = self._request(spec, payload, (), timeout, on_late)
        self._wait_here(item, item.deadline)
        try:
            return item.result(_LAST_RESORT_S).payload
        finally:
            # An error's traceback refers to this frame: a cycle would keep the caller's buffers until it is collected.
            del item

    def begin(
        self,
        spec: RequestSpec,
        payload: Message,
        buffers: Sequence[Buffer] = (),
        *,
        timeout: float,
        turn: float = 0.0,
        on_late: OnLate | None = None,
    ) -> Future[Answer]:
        """See `Connection.begin`. Does not wait while the server takes longer, nor in callbacks of futures."""
        try:
            item = self._request(spec, payload, buffers, timeout, on_late)
        except errors.KVFrameworkError as error:
            return Future.failed(error.with_traceback(None))
        if turn > 0 and self._prompt and not self.watch.suspect and not self.runs_here():
            self._wait_here(item, min(item.deadline, self._clock() + turn))
            return item
        entered = self._enter()
        try:
            with self._lock:
                if not self._closed:
                    self._outbox.append(item)
                    self._wakeup.signal()
                    return item
        finally:
            self._leave(entered)
        item.resolve(self.gone())
        return item

    def post(self, spec: RequestSpec, payload: Message) -> bool:
        frames = join(NO_ANSWER, spec.name, payload)
        entered = self._enter()
        try:
            self._send_outbox()
            self._dealer.send(frames)
        except zmq.ZMQError:
            return False
        except BaseException as error:
            self._interrupted(error)
            raise
        finally:
            self._leave(entered)
        return True

    def say_goodbye(self, why: errors.KVFrameworkError | None = None) -> None:
        """Report losses to the server, the end if it would not notice, and `why` it cannot be used. Waits a moment."""
        ping = self.reports.ping()
        with contextlib.suppress(errors.KVFrameworkError):
            if ping != Ping():
                self.begin(_PING, ping, timeout=_GOODBYE_S).result(2 * _GOODBYE_S)
                self.reports.answered(ping)
        with contextlib.suppress(errors.KVFrameworkError):
            if self.liveness is None or why is not None:
                goodbye = Goodbye(why.code, why.fact) if why is not None else Goodbye()
                self.begin(_GOODBYE, goodbye, timeout=_GOODBYE_S).result(2 * _GOODBYE_S)

    def close(self) -> None:
        """End the link and wait for its thread, unless called by it. Idempotent."""
        self._stop()
        if not self.runs_here():
            self._thread.join()

    def gone(self) -> errors.KVFrameworkError:
        return errors.ServerGone(self.reason.fact if self.reason else "the connection was closed")

    # in the thread of a waiting caller

    def _wait_here(self, item: Request, until: float) -> None:
        """Send the request and wait. Afterwards the future is resolved, or pending and served by the I/O thread, if
        `until` is before its deadline."""
        entered = self._enter()
        try:
            self._exchange(item, until)
            if item.query():
                return
            if until < item.deadline:
                self._prompt = False
                self._pending.watch(item)
            elif self._pending.give_up(item):
                self.watch.doubt(item.deadline - item.timeout, self._clock())
                item.expire()
            else:
                item.wait(_LAST_RESORT_S)  # another thread is about to resolve it
                item.expire()
            self._wakeup.signal()
        except BaseException as error:
            self._dealer.follow()
            self._interrupted(error)
            raise
        finally:
            self._leave(entered)

    def _exchange(self, item: Request, until: float) -> None:
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
        while not item.query():
            if self._dealer.lead():
                try:
                    self._receive_until(item, until)
                finally:
                    self._dealer.follow()
                    if self._pending:
                        self._wakeup.signal()  # no thread receives the answers that others wait for
            else:
                item.wait(max(until - self._clock(), 0.0))
                if self._clock() >= until:
                    self._receive()
            if self._clock() >= until:
                return

    def _receive_until(self, item: Request, until: float) -> None:
        while not item.query():
            self._dealer.wait(until, self._callers)
            self._receive(leading=True)
            if self._clock() >= until:
                return

    # in any thread

    def _request(
        self, spec: RequestSpec, payload: Message, buffers: Sequence[Buffer], timeout: float, on_late: OnLate | None
    ) -> Request:
        request_id = next(self._ids)
        try:
            frames = frames_io.outgoing(join(request_id, spec.name, payload, buffers))
        except errors.KVFrameworkError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise errors.InvalidPayload(str(error), where=spec.name) from error
        return Request(self, request_id, frames, spec, timeout, on_late)

    def _enter(self) -> bool:
        caller = threading.get_ident()
        if caller in self._within:
            return False
        self._within.add(caller)
        return True

    def _leave(self, entered: bool) -> None:
        if entered:
            self._within.discard(threading.get_ident())

    def _interrupted(self, error: BaseException) -> None:
        self._stop(errors.ServerGone(f"{type(error).__name__} interrupted sending a message"))

    def _send_outbox(self) -> None:
        """Send what `begin` has left, oldest first. Raises `zmq.ZMQError` once the link has ended."""
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

    def _send(self, item: Request) -> None:
        """Send a request. One that needs room follows the tickets that were freed before it. Raises `zmq.ZMQError`."""
        while item.spec.name in ROOM_REQUESTS and (free := self.reports.take_freed()):
            try:
                self._dealer.send(join(next(self._ids), _PING.name, Ping(free=free)))
            except zmq.ZMQError:
                self.reports.free(free)
                raise
        frames = item.frames
        if not frames:
            return  # a hostile server has answered it already
        if item.spec.name != "END_SESSION":
            self._dealer.send(frames)
            return
        with self._sending:
            self.released_at = math.inf
            self._dealer.send(frames)
            self.released_at = self._clock()

    def _receive(self, *, leading: bool = False) -> None:
        messages = self._dealer.receive(_MESSAGES_PER_ROUND)
        if messages:
            self.watch.heard_at = self._clock()
            self._prompt = True
        for frames in messages:
            try:
                envelope = split(frames)
            except errors.ProtocolError as error:
                logger.error("dropped an invalid message of the server: %s", error)
                continue
            item = self._pending.take(envelope.request_id)
            if item is not None:
                (self._on_late if item.late else self._on_answer)(item, envelope)
        if messages and not leading:
            self._dealer.interrupt()

    def _on_answer(self, item: Request, envelope: Envelope) -> None:
        try:
            item.resolve(item.answer(envelope))
        except errors.KVFrameworkError as error:
            # Its traceback refers to the caller's frames: a cycle would keep the arena mapped until it is collected.
            error.with_traceback(None)
            if isinstance(error, errors.HelloRequired):
                self._stop(error)  # before the caller, who may retry at once, gets the error
            item.resolve(error)
        finally:
            item.frames = []  # the caller may keep the future for long
            if not item.query():  # a signal interrupted it
                item.resolve(self.gone())

    def _on_late(self, item: Request, envelope: Envelope) -> None:
        try:
            answer = item.answer(envelope)
            assert item.on_late is not None
            item.on_late(answer.payload)
        except errors.KVFrameworkError:
            return  # it grants nothing
        except Exception:
            logger.exception("leases in a late answer to %s could not be released", item.spec.name)

    def _on_pong(self, ping: Ping, reply: Future[Answer]) -> None:
        """Any answer shows that the server's loop is alive."""
        error = reply.exception()
        if isinstance(error, (errors.ServerGone, errors.HelloRequired)):
            return  # the link ends
        if error is None:
            self.reports.answered(ping)
        self.watch.answered(self._clock())

    def _full(self, item: Request) -> errors.KVFrameworkError:
        now = self._clock()
        self.watch.doubt(now, now)
        return errors.ServerGone("the server does not read this client's messages", where=item.spec.name)

    def _stop(self, reason: errors.KVFrameworkError | None = None) -> None:
        self.reason = self.reason or reason
        with self._lock:
            self._closed = True
        self._wakeup.signal()

    # in the I/O thread

    def _run(self) -> None:
        try:
            idle, leading = self._poller(), self._dealer.watch(self._poller())
            while not self._closed:
                self._round(idle, leading)
        except Exception as error:
            logger.exception("the connection's I/O thread failed")
            self.reason = errors.ServerGone(f"the connection failed: {error}")
        finally:
            self._end()

    def _poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wakeup.fd, zmq.POLLIN)
        if self.liveness is not None:
            poller.register(self.liveness.fd, zmq.POLLIN)
        return poller

    def _round(self, idle: zmq.Poller, leading: zmq.Poller) -> None:
        wake_at = min(self.watch.next_at, self._pending.next_deadline() or math.inf)
        leads = bool(self._pending) and self._dealer.lead()
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
        if self.liveness is not None and self.liveness.fd in ready:
            self._receive()  # messages that the server sent before its end
            self._stop(errors.ServerGone("the server has ended"))
            return
        now = self._clock()
        if now >= wake_at:
            self._receive()  # this process may have been stopped: answers that have arrived by now were not late
            for item in self._pending.due(now):
                self.watch.doubt(item.deadline - item.timeout, now)
                item.expire()
            self._beat(now)

    def _beat(self, now: float) -> None:
        self.watch.log(now)
        silence = self.watch.unanswered_s(now)
        if silence:
            if self.liveness is None and silence >= self.gone_s:
                self._stop(errors.ServerGone(f"the server has answered no PING for {silence:.0f} s"))
                return
            self.watch.doubt(now - silence, now)
        if now < self.watch.next_at:
            return
        ping, free = self.reports.ping(), self.reports.take_freed()
        self._send_outbox()  # requests that name those tickets
        item = self._request(_PING, replace(ping, free=free) if free else ping, (), math.inf, None)
        item.add_done_callback(lambda reply: self._on_pong(ping, reply))
        self._pending.add(item, watched=False)
        self.watch.pinged(now)  # before another thread can have its answer
        try:
            self._dealer.send(item.frames)
        except zmq.Again:
            self.reports.free(free)
            self._pending.take(item.request_id)
            if silence:
                self._stop(errors.ServerGone("the connection is broken"))

    def _end(self) -> None:
        self._stop()
        unanswered = self._pending.close()
        with self._sending:
            unanswered += self._outbox
            self._outbox.clear()
        for item in unanswered:
            item.resolve(self.gone())
        self._dealer.close()
        if self.liveness is not None:
            self.liveness.close()
        self._wakeup.close()
        self.ended.set()
        self.watch.changed()
