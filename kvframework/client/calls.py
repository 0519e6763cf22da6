"""The requests of one client session: how each is sent, how long its caller waits, and what is counted when it fails.

`wire/protocol.py` has the table of how long an engine's thread waits, and how long a request goes on without
that thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvframework.api.futures import Future, Promise
from kvframework.api.hasher import Buffer
from kvframework.api.transport import LostKind
from kvframework.api.types import Message
from kvframework.errors import Cancelled, DeadlineExceeded, ServerGone
from kvframework.messaging.client.connection import Connection
from kvframework.messaging.client.pending import Answer
from kvframework.wire.protocol import ClientDeadlines

# The conversion of a request's answer into its caller's result. Runs in the thread that resolves the future.
#
# Errors lose their traceback: its frames refer to the future, and so to themselves. Until the cycle was collected it
# would keep the engine's tensors, and the arena mapped.

M = TypeVar("M", bound=Message)
R = TypeVar("R")


def as_response(reply: Message, response: type[M]) -> M:
    """Return the response in an answer. Raises `ServerGone` for an answer of another type."""
    if not isinstance(reply, response):
        raise ServerGone(f"answered with {type(reply).__name__}, not {response.__name__}")
    return reply


def only(response: type[M], on_late: Callable[[M], None] | None) -> Callable[[Message], None] | None:
    """Return `on_late` restricted to answers of the right type."""
    if on_late is None:
        return None

    def late(reply: Message) -> None:
        if isinstance(reply, response):
            on_late(reply)

    return late


def mapped(sent: Future[Answer], result_of: Callable[[Answer], R]) -> Future[R]:
    """Return a future of `result_of` the answer; it fails with any error that `result_of` raises."""
    future: Promise[R] = Promise(sent.cancel)
    _answer(sent, result_of, future.set_result, future.set_exception)
    return future


def settled(sent: Future[Answer], result_of: Callable[[Answer], R], failed: Callable[[BaseException], R]) -> Future[R]:
    """Return a `mapped` future that never fails: `failed` makes its result from an error."""
    future: Promise[R] = Promise(sent.cancel)
    _answer(sent, result_of, future.set_result, lambda error: future.set_result(failed(error)))
    return future


def granted(sent: Future[Answer], plan_of: Callable[[Answer], R], give_back: Callable[[R], object]) -> Future[R]:
    """Return a `mapped` future for a reservation of the server: a cancelled future fails at once, and the answer's
    grant is given back when it arrives. The request itself is not cancelled."""
    future: Promise[R]

    def cancel() -> None:
        future.set_exception(Cancelled("the request was cancelled"))

    def succeed(plan: R) -> None:
        if not future.set_result(plan):
            give_back(plan)

    future = Promise(cancel)
    _answer(sent, plan_of, succeed, future.set_exception)
    return future


def _answer(
    sent: Future[Answer],
    result_of: Callable[[Answer], R],
    succeed: Callable[[R], object],
    fail: Callable[[BaseException], object],
) -> None:
    """Call `succeed` with `result_of` the answer, or `fail` with the error, once the request is answered."""

    def answered(reply: Future[Answer]) -> None:
        error = reply.exception()
        if error is not None:
            fail(error)
            return
        try:
            result = result_of(reply.result(0))
        except Exception as failure:  # noqa: BLE001 - a future without a result would never end
            fail(failure.with_traceback(None))
            return
        succeed(result)

    sent.add_done_callback(answered)


class Withdrawals:
    """The END_SESSIONs of one session: each may end what a load has pinned before. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._last = -math.inf

    def none_since(self, began: float) -> bool:
        """Whether none has ended what was pinned from `began` on, a time of the monotonic clock, and none will."""
        return not self._open and self._last < began

    def begun(self) -> None:
        with self._lock:
            self._open += 1

    def ended(self, error: BaseException | None = None) -> None:
        """One was answered, or has failed: it may yet be answered after its deadline, and is open until then."""
        if not isinstance(error, DeadlineExceeded):
            with self._lock:
                self._open, self._last = self._open - 1, time.monotonic()


class ServerCalls:
    """The sending half of `KVClient`, which makes the connection. Thread-safe."""

    deadlines: ClientDeadlines
    _connection: Connection
    _withdrawals: Withdrawals

    def request(
        self,
        name: str,
        payload: Message,
        response: type[M],
        *,
        timeout: float | None = None,
        urgent: bool = False,
        on_late: Callable[[M], None] | None = None,
    ) -> M:
        """Send a request and wait for its answer; `timeout` in seconds, None: that of the table. Raises typed errors,
        `DeadlineExceeded` and `ServerGone`.

        `on_late` is called, in the connection's thread, with an answer that arrives after the wait has ended.
        """
        wait, late = self.deadlines.of(name) if timeout is None else timeout, only(response, on_late)
        if name == "END_SESSION":
            sent = self._withdraw(partial(self._connection.request, name, payload, timeout=wait, urgent=urgent), late)
            return as_response(sent.result().payload, response)
        return as_response(self._connection.ask(name, payload, timeout=wait, urgent=urgent, on_late=late), response)

    def begin(
        self,
        name: str,
        payload: Message,
        response: type[M],
        *,
        urgent: bool = False,
        on_late: Callable[[M], None] | None = None,
    ) -> Future[M]:
        """Send a request from an engine's thread, which waits `deadlines.engine_s` at most: the future is resolved by
        then, or later, by the request's own deadline. Never raises."""
        sent = self._begin(name, payload, urgent=urgent, on_late=only(response, on_late))
        return mapped(sent, lambda answer: as_response(answer.payload, response))

    def reachable(self, request: str) -> bool:
        """Return whether `begin` would send this request: connected, and the server silent for less than its deadline.
        Never blocks."""
        return self._connection.reachable(self.deadlines.of(request))

    def lost(self, kind: LostKind, code: str, nbytes: int = 0) -> None:
        """Count a lookup, load or store that failed without an answer, or with an error of this code: the server's
        status shows it. `nbytes` is its size. Never blocks."""
        if code == ServerGone.code and self._connection.state == "suspect":
            code = DeadlineExceeded.code  # the server is there, and does not answer
        self._connection.losses.add(kind, code, nbytes)

    def too_short(self, request_id: str, tokens: int) -> None:
        """Count a prompt of `tokens` tokens that was not looked up, as it has no whole chunk: `kvframework explain`
        shows it. Never blocks."""
        self._connection.short.add(request_id, tokens)

    def send(self, name: str, payload: Message) -> None:
        """Send a request without interest in its answer. Never blocks, never raises."""
        sent = partial(self._connection.request, name, payload, timeout=self.deadlines.of(name), urgent=True)
        if name == "END_SESSION":
            self._withdraw(sent)
        else:
            sent()

    def _begin(
        self,
        name: str,
        payload: Message,
        *,
        urgent: bool = False,
        on_late: Callable[[Message], None] | None = None,
    ) -> Future[Answer]:
        wait, turn = self.deadlines.of(name), self.deadlines.engine_s
        if name == "END_SESSION":
            begin = partial(self._connection.begin, name, payload, timeout=wait, turn=turn, urgent=urgent)
            return self._withdraw(begin, on_late)
        return self._connection.begin(name, payload, timeout=wait, turn=turn, urgent=urgent, on_late=on_late)

    def _withdraw(
        self, send: Callable[..., Future[Answer]], on_late: Callable[[Message], None] | None = None
    ) -> Future[Answer]:
        """Send an END_SESSION, and note that it is under way: other requests may overtake it."""
        withdrawals = self._withdrawals
        withdrawals.begun()

        def late(reply: Message) -> None:
            withdrawals.ended()
            if on_late is not None:
                on_late(reply)

        sent = send(on_late=late)
        sent.add_done_callback(lambda ended: withdrawals.ended(ended.exception()))
        return sent

    def _bulk(self, name: str, payload: Message, buffers: Sequence[Buffer], nbytes: int) -> Future[Answer]:
        return self._connection.bulk_request(name, payload, buffers, timeout=self.deadlines.of_bulk(nbytes))
