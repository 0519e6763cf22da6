"""The unanswered requests of a link: their futures and deadlines. Thread-safe."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvframework.api.futures import Future, Promise
from kvframework.api.requests import Buffer, Message, RequestSpec
from kvframework.errors import DeadlineExceeded, InvalidPayload, KVFrameworkError, ProtocolError
from kvframework.messaging import frames_io
from kvframework.messaging.polling import Deadlines
from kvframework.wire.frames import ERROR_TYPE, Envelope, ErrorPayload, decode, error_from, join
from kvframework.wire.protocol import HINT

logger = logging.getLogger(__name__)

_MAX_LATE = 4096

# Sends the CANCEL of a request id; returns the future of its answer.
SendCancel = Callable[[int], "Future[Answer]"]


class Answer(NamedTuple):
    """What the server answered: the response, and the raw buffers behind it."""

    payload: Message
    buffers: Sequence[memoryview] = ()


class RequestFuture(Promise[Answer]):
    """The future of a request that was sent. `cancel()` asks the server, which answers the request as always."""

    __slots__ = ("_send_cancel", "request_id", "resting")

    def __init__(self, send_cancel: SendCancel, request_id: int) -> None:
        super().__init__()
        self._send_cancel = send_cancel
        self.request_id = request_id
        self.resting = False  # whether its caller only waits, so that a signal may interrupt it without harm

    def cancel(self) -> None:
        if not self.query():
            self._send_cancel(self.request_id)

    def cancelled(self) -> Future[Answer]:
        """Send CANCEL and return the future of its answer, which comes once the server no longer touches anything for
        the request."""
        return self._send_cancel(self.request_id)

    def rest(self, timeout: float) -> None:
        """Wait until it is resolved, at most `timeout` seconds."""
        self.resting = True
        self.wait(max(timeout, 0.0))
        self.resting = False


class Outgoing(NamedTuple):
    """A request; `deadline` is on the monotonic clock. `on_late` receives an answer that arrives after it."""

    request_id: int
    frames: list[Any]
    spec: RequestSpec
    future: RequestFuture
    timeout: float
    deadline: float
    on_late: Callable[[Message], None] | None = None

    @classmethod
    def of(
        cls,
        send_cancel: SendCancel,
        request_id: int,
        spec: RequestSpec,
        payload: Message,
        buffers: Sequence[Buffer],
        timeout: float,
        on_late: Callable[[Message], None] | None,
    ) -> Outgoing:
        """Encode a request, ready to send. Raises `InvalidPayload` or `MessageTooLarge`."""
        try:
            frames = frames_io.outgoing(join(request_id, spec.name, payload, buffers))
        except KVFrameworkError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidPayload(str(error), where=spec.name) from error
        future = RequestFuture(send_cancel, request_id)
        return cls(request_id, frames, spec, future, timeout, time.monotonic() + timeout, on_late)

    def answer(self, envelope: Envelope) -> Answer:
        """Return the server's response. Raises the error that it named, and `ProtocolError` or `InvalidPayload` for a
        reply that does not answer this request."""
        if envelope.type == ERROR_TYPE:
            raise error_from(decode(envelope.payload, ErrorPayload, where=self.spec.name))
        if envelope.type != self.spec.name:
            raise ProtocolError(f"the server answered with {envelope.type!r}", where=self.spec.name)
        payload = decode(envelope.payload, self.spec.response, where=f"response of {self.spec.name}")
        return Answer(payload, envelope.buffers)

    def resolve(self, outcome: Answer | KVFrameworkError) -> None:
        """Resolve the future, in the calling thread. A callback that fails is logged."""
        try:
            if isinstance(outcome, KVFrameworkError):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)
        except Exception:
            logger.exception("a callback of a %s future failed", self.spec.name)

    def unanswered(self) -> KVFrameworkError:
        """Return the error with which it fails at its deadline."""
        return DeadlineExceeded(f"no answer within {self.timeout:.4g} s", where=self.spec.name, hint=HINT)


class Pending:
    """The unanswered requests. The thread that removes a request must resolve it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: dict[int, Outgoing] = {}
        self._deadlines: Deadlines[int] = Deadlines()
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Outgoing, *, watched: bool) -> bool:
        """Add a request. `watched` means that `due` returns it at its deadline; else its caller handles that. False
        after `close`."""
        with self._lock:
            if self._closed:
                return False
            self._items[item.request_id] = item
            if watched:
                self._deadlines.set(item.request_id, item.deadline)
            return True

    def watch(self, item: Outgoing) -> None:
        """Leave the deadline of a request to `due`, since its caller no longer waits; no effect once it was
        answered."""
        with self._lock:
            if item.request_id in self._items:
                self._deadlines.set(item.request_id, item.deadline)

    def take(self, request_id: int) -> Outgoing | None:
        """Remove a request; None if another thread has taken it."""
        with self._lock:
            self._deadlines.discard(request_id)
            return self._items.pop(request_id, None)

    def lapse(self, item: Outgoing, into: deque[Outgoing | Envelope]) -> bool:
        """Atomically move a timed-out request to `into`; False if another thread has taken it. A thread that does not
        find it here finds it in `into`."""
        with self._lock:
            if item.request_id not in self._items:
                return False
            into.append(item)
            self._deadlines.discard(item.request_id)
            del self._items[item.request_id]
            return True

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of the watched requests."""
        with self._lock:
            return self._deadlines.next()

    def due(self, now: float) -> list[Outgoing]:
        """Remove and return the watched requests whose deadline has passed."""
        with self._lock:
            return [self._items.pop(request_id) for request_id in self._deadlines.due(now)]

    def close(self) -> list[Outgoing]:
        """Remove and return all requests; later ones are refused."""
        with self._lock:
            self._closed = True
            items = list(self._items.values())
            self._items.clear()
            return items


class LateAnswers:
    """Keeps the newest 4096 timed-out requests that have an `on_late`."""

    def __init__(self) -> None:
        self._items: dict[int, Outgoing] = {}

    def expect(self, item: Outgoing) -> None:
        if item.on_late is not None:
            self._items[item.request_id] = item
            if len(self._items) > _MAX_LATE:
                del self._items[next(iter(self._items))]

    def give_back(self, envelope: Envelope) -> None:
        """Pass a late answer to `on_late` of its request, once. Errors grant nothing."""
        item = self._items.pop(envelope.request_id, None)
        if item is None or item.on_late is None or envelope.type != item.spec.name:
            return
        try:
            item.on_late(decode(envelope.payload, item.spec.response, where=f"response of {item.spec.name}"))
        except Exception:
            logger.exception("what a late answer to %s granted could not be released", item.spec.name)
