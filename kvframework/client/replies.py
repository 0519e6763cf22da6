"""The conversion of a request's answer into its caller's result. Runs in the thread that resolves the future.

Errors lose their traceback: its frames refer to the future, and so to themselves. Until the cycle was collected it
would keep the engine's tensors, and the arena mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvframework.api.futures import Future, Promise
from kvframework.api.types import Message
from kvframework.errors import Cancelled, ServerGone
from kvframework.messaging.client.pending import Answer

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
