"""Owns how the answer to a request becomes what its caller asked for. Runs in the thread that resolves the future."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvframework.api import Message, MessagingFuture
from kvframework.errors import KVFrameworkError, ServerGone

M = TypeVar("M", bound=Message)
R = TypeVar("R")


def as_response(reply: Message, response: type[M]) -> M:
    """Raises `ServerGone` for an answer to something else."""
    if not isinstance(reply, response):
        raise ServerGone(f"answered with {type(reply).__name__}, not {response.__name__}")
    return reply


def mapped(
    sent: MessagingFuture[Message], result_of: Callable[[Message, Sequence[memoryview]], R]
) -> MessagingFuture[R]:
    """A future of what `result_of(response, its buffers)` makes of the answer; it fails with what that raises."""
    future: MessagingFuture[R] = MessagingFuture(sent.cancel)

    def answered(reply: MessagingFuture[Message]) -> None:
        error = reply.exception()
        if error is not None:
            future.set_exception(error)
            return
        buffers: Sequence[memoryview] = reply.detail  # type: ignore[assignment]
        try:
            result = result_of(reply.result(0), buffers)
        except KVFrameworkError as failure:
            future.set_exception(failure)
            return
        future.set_result(result)

    sent.add_done_callback(answered)
    return future
