"""`Call`: one request from its arrival until all work on it has ended. Serving thread only."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
from typing import Any

from kvframework.api.futures import Future, Promise
from kvframework.api.requests import Handler, HandlerResult, Message
from kvframework.messaging.server.sessions import ClientSession
from kvframework.wire.messages import CancelReply

CallKey = tuple[int, int]


class Call:
    """A request and its progress.

    `answered` and `done` differ: after a deadline or its session's end a call counts as answered while its work
    continues; it is done, and a CANCEL of it is answered, once that work has ended. `received` is the time of its
    receipt.
    """

    __slots__ = (
        "answered",
        "buffers",
        "cancelled",
        "done",
        "future",
        "handler",
        "identity",
        "job",
        "key",
        "nbytes",
        "payload",
        "received",
        "request_id",
        "session",
        "started",
        "waiters",
    )

    def __init__(
        self,
        session: ClientSession,
        identity: bytes,
        request_id: int,
        handler: Handler[Any],
        payload: Message,
        buffers: Sequence[memoryview],
        received: float = 0.0,
    ) -> None:
        self.key: CallKey = (session.session_id, request_id)
        self.session = session
        self.identity = identity
        self.request_id = request_id
        self.handler = handler
        self.payload: Message | None = payload
        self.buffers = buffers
        self.received = received
        self.nbytes = sum(buffer.nbytes for buffer in buffers) if buffers else 0
        self.started = self.answered = self.done = self.cancelled = False
        self.job: futures.Future[None] | None = None
        self.future: Future[Message] | None = None
        self.waiters: list[Promise[Message]] = []

    def run(self) -> HandlerResult | BaseException:
        """Call the handler; return its result or the exception that it raised. Called once, in the serving or in a pool
        thread."""
        payload, self.payload = self.payload, None
        buffers, self.buffers = self.buffers, ()
        try:
            result: HandlerResult = self.handler.call(self.session, payload, buffers)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 (native code panics with BaseException; the error is answered)
            return error
        return result

    def withdraw(self) -> bool:
        """Return True if the call has not begun and now never will."""
        if self.job is not None:
            return self.job.cancel()
        return not self.started

    def finish(self) -> None:
        """Mark the end of all work on the call: release what it holds and answer the CANCELs that wait for it."""
        self.done = True
        self.payload, self.buffers, self.future, self.job = None, (), None, None
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.set_result(CancelReply(found=True))


def outcome_of(future: Future[Message]) -> HandlerResult | BaseException:
    """Return the content of a resolved future."""
    error = future.exception()
    return error if error is not None else future.result(0)
