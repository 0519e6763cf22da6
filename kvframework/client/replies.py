"""The way from the answer to a request to what its caller asked for. Runs in the thread that resolves the future.

Errors lose their traceback: its frames refer to the future, and so to themselves. Until the cycle was collected it
would keep the engine's tensors, and the arena mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvframework.api.futures import Future, Promise
from kvframework.api.types import Message
from kvframework.errors import Cancelled, KVFrameworkError, ServerGone
from kvframework.messaging.client.pending import Answer

M = TypeVar("M", bound=Message)
R = TypeVar("R")


def as_response(reply: Message, response: type[M]) -> M:
    """Raises `ServerGone` for an answer to something else."""
    if not isinstance(reply, response):
        raise ServerGone(f"answered with {type(reply).__name__}, not {response.__name__}")
    return reply


def mapped(sent: Future[Answer], result_of: Callable[[Answer], R]) -> Future[R]:
    """A future of what `result_of` makes of the answer; it fails with what that raises."""
    future: Promise[R] = Promise(sent.cancel)

    def answered(reply: Future[Answer]) -> None:
        error = reply.exception()
        if error is not None:
            future.set_exception(error)
            return
        try:
            result = result_of(reply.result(0))
        except KVFrameworkError as failure:
            future.set_exception(failure.with_traceback(None))
            return
        future.set_result(result)

    sent.add_done_callback(answered)
    return future


def settled(sent: Future[Answer], result_of: Callable[[Answer], R], failed: Callable[[BaseException], R]) -> Future[R]:
    """`mapped` for a future that never fails: `failed` says what its result is after an error."""
    future: Promise[R] = Promise(sent.cancel)

    def answered(reply: Future[Answer]) -> None:
        error = reply.exception()
        if error is not None:
            future.set_result(failed(error))
            return
        try:
            result = result_of(reply.result(0))
        except KVFrameworkError as failure:
            result = failed(failure.with_traceback(None))
        future.set_result(result)

    sent.add_done_callback(answered)
    return future


def granted(sent: Future[Answer], plan_of: Callable[[Answer], R], give_back: Callable[[R], object]) -> Future[R]:
    """`mapped` for what the server reserves: a future that is cancelled fails at once, and the answer's grant is given
    back when it comes. The request itself is not cancelled."""
    future: Promise[R]

    def cancel() -> None:
        future.set_exception(Cancelled("the request was cancelled"))

    future = Promise(cancel)

    def answered(reply: Future[Answer]) -> None:
        error = reply.exception()
        if error is not None:
            future.set_exception(error)
            return
        try:
            plan = plan_of(reply.result(0))
        except KVFrameworkError as failure:
            future.set_exception(failure.with_traceback(None))
            return
        if not future.set_result(plan):
            give_back(plan)

    sent.add_done_callback(answered)
    return future
