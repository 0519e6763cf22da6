"""The calls in flight: from a decoded message to its answer, whatever happens to its handler. Runs on the serving
thread; pooled handlers run in worker threads and return their results through a queue."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvframework import errors
from kvframework.api.futures import Future, Promise
from kvframework.api.requests import ClientInfo, Handler, HandlerResult, Message, Reply
from kvframework.messaging.polling import Deadlines
from kvframework.messaging.server.sessions import ClientSession
from kvframework.messaging.server.sockets import Routers
from kvframework.wire.frames import MAX_BUFFER_BYTES, Envelope, decode
from kvframework.wire.messages import Cancel, CancelReply
from kvframework.wire.protocol import REQUESTS

logger = logging.getLogger(__name__)

CallKey = tuple[int, int]
# The histograms reach from 10 us to 10 s.
FIRST_S, OCTAVES = 1e-5, 20
MAX_IN_FLIGHT = 4096
MAX_BYTES_IN_FLIGHT = 2 * MAX_BUFFER_BYTES


@dataclass(slots=True, eq=False)
class Call:
    """A request, which came at `received`, and its progress. After a deadline or its session's end it is `answered`
    while its work continues; it is `done`, and a CANCEL of it is answered, once that has ended."""

    session: ClientSession
    identity: bytes
    request_id: int
    handler: Handler[Any]
    payload: Message | None
    buffers: Sequence[memoryview]
    received: float
    started: bool = False
    answered: bool = False
    done: bool = False
    cancelled: bool = False
    job: futures.Future[None] | None = None
    future: Future[Message] | None = None
    waiters: list[Promise[Message]] = field(default_factory=list)
    key: CallKey = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.key = (self.session.session_id, self.request_id)
        self.nbytes = sum(buffer.nbytes for buffer in self.buffers)

    def run(self) -> HandlerResult | BaseException:
        """Call the handler; return its result or the exception that it raised. In the serving or in a pool thread."""
        payload, self.payload = self.payload, None
        buffers, self.buffers = self.buffers, ()
        try:
            result: HandlerResult = self.handler.call(self.session, payload, buffers)
            return result
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 (native code panics with BaseException; the error is answered)
            return error

    def withdraw(self) -> bool:
        """True if the call has not begun and now never will."""
        return self.job.cancel() if self.job is not None else not self.started

    def finish(self) -> None:
        self.done = True
        self.payload, self.buffers, self.future, self.job = None, (), None, None
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.set_result(CancelReply(found=True))


def outcome_of(future: Future[Message]) -> HandlerResult | BaseException:
    error = future.exception()
    return error if error is not None else future.result(0)


@dataclass(eq=False, repr=False)
class InFlight:
    """Runs handlers and answers for them. `wake`, called from other threads, makes the serving loop call `collect()`;
    `took(name, received)` counts an answer."""

    handlers: Mapping[str, Handler[Any]]
    routers: Routers
    workers: int
    wake: Callable[[], None]
    counters: dict[str, int]
    took: Callable[[str, float], None]

    def __post_init__(self) -> None:
        cancel = Handler[Cancel](REQUESTS["CANCEL"], self._cancel_request)
        self._handlers: dict[str, Handler[Any]] = {**self.handlers, "CANCEL": cancel}
        # Serves a CANCEL whose target is named by other means than a message's id.
        self._cancel_other = self.handlers.get("CANCEL")
        self._calls: dict[CallKey, Call] = {}
        self._advance: deque[ClientSession] = deque()
        self._deadlines: Deadlines[CallKey] = Deadlines()
        self.next_deadline = self._deadlines.next
        self._results: deque[tuple[Call, HandlerResult | BaseException]] = deque()
        self._serving_thread = 0
        # One pool for each request: any number of DUMPs takes no thread from REPORT_STATUS.
        self._pools: dict[str, ThreadPoolExecutor] = {}

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def submit(self, session: ClientSession, identity: bytes, envelope: Envelope, received: float) -> None:
        """Start or queue a request that arrived at `received`. Raises `ProtocolError` for one that is not accepted."""
        handler = self._handlers.get(envelope.type)
        if handler is None:
            raise errors.UnknownRequest(
                f"unknown request {envelope.type!r}", hint="configure the plugin that serves the request"
            )
        spec, buffers = handler.spec, envelope.buffers
        if (session.session_id, envelope.request_id) in self._calls:
            raise errors.MalformedFrames(f"request id {envelope.request_id} is already in use", where=spec.name)
        if len(buffers) > spec.buffers:
            raise errors.MalformedFrames(
                f"found {len(buffers)} buffers", where=spec.name, available=f"at most {spec.buffers}"
            )
        if session.in_flight >= MAX_IN_FLIGHT:
            raise errors.ProtocolError(
                f"the client has {MAX_IN_FLIGHT} requests in progress",
                hint="wait for answers before sending more requests",
            )
        payload = decode(envelope.payload, spec.payload, where=spec.name)
        call = Call(session, identity, envelope.request_id, handler, payload, buffers, received)
        if call.nbytes and session.bytes_in_flight + call.nbytes > MAX_BYTES_IN_FLIGHT:
            fact = f"this client has {session.bytes_in_flight} bytes in progress, and {call.nbytes} more arrived"
            hint = "wait for answers before sending more requests"
            raise errors.MessageTooLarge(
                fact, where=spec.name, available=f"at most {MAX_BYTES_IN_FLIGHT} bytes", hint=hint
            )
        if handler.ordered:
            session.ordered.append(call)
            if len(session.ordered) > 1:
                self._track(call)
                return
        self._start(call)
        self._run_queues()

    def collect(self) -> None:
        """Process what other threads and resolved futures have left since the last call."""
        self._serving_thread = threading.get_ident()
        for _ in range(len(self._results)):
            call, result = self._results.popleft()
            self._settle(call, result)
        self._run_queues()

    def expire(self, now: float) -> None:
        """Answer the calls whose deadline has passed. Work that has begun continues; its late result is dropped."""
        for key in self._deadlines.due(now):
            call = self._calls[key]
            spec = call.handler.spec
            withdrawn = call.withdraw()
            self._answer(call, errors.DeadlineExceeded(f"no result within {spec.deadline_s} s", where=spec.name))
            if withdrawn:
                self._finish(call)
        self._run_queues()

    def end_session(self, session: ClientSession) -> None:
        """Cancel all calls of the session; they are no longer answered."""
        if not session.in_flight:
            return
        for call in [call for call in self._calls.values() if call.session is session]:
            call.answered = True
            self._deadlines.discard(call.key)
            self._cancel(call)
        self._run_queues()

    def answer_all(self, error: errors.KVFrameworkError) -> None:
        """Answer every call in flight with `error` when the server stops. Cancels none."""
        for call in self._calls.values():
            if not call.answered:
                self._answer(call, error)

    def close(self) -> None:
        """Cancel what has not begun. Does not wait for handlers in worker threads."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, call: Call) -> None:
        call.started = True
        if not call.handler.pooled:
            self._settle(call, call.run())
            return
        self._track(call)
        name = call.handler.spec.name
        if name not in self._pools:
            self._pools[name] = ThreadPoolExecutor(self.workers, thread_name_prefix="kvf-worker")
        call.job = self._pools[name].submit(lambda: self._hand_over(call, call.run()))

    def _hand_over(self, call: Call, result: HandlerResult | BaseException) -> None:
        self._results.append((call, result))
        # A system call gives the interpreter away, and the serving thread sees the result by itself.
        if threading.get_ident() != self._serving_thread:
            self.wake()

    def _settle(self, call: Call, result: HandlerResult | BaseException) -> None:
        if isinstance(result, Future):
            if not result.query():
                self._wait_for(call, result)
                return
            result = outcome_of(result)
        if call.answered:
            self.counters["late"] += 1
        else:
            self._answer(call, result)
        self._finish(call)

    def _wait_for(self, call: Call, future: Future[Message]) -> None:
        self._track(call)
        call.job, call.future = None, future
        future.add_done_callback(lambda resolved: self._hand_over(call, outcome_of(resolved)))
        if call.cancelled:
            self._cancel(call)

    def _track(self, call: Call) -> None:
        if call.key in self._calls:
            return
        self._calls[call.key] = call
        call.session.in_flight += 1
        call.session.bytes_in_flight += call.nbytes
        self._deadlines.set(call.key, time.monotonic() + call.handler.spec.deadline_s)

    def _finish(self, call: Call) -> None:
        if self._calls.pop(call.key, None) is not None:
            self._deadlines.discard(call.key)
            call.session.in_flight -= 1
            call.session.bytes_in_flight -= call.nbytes
        call.finish()
        if call.handler.ordered:
            self._advance.append(call.session)

    def _run_queues(self) -> None:
        """Start the ordered calls whose turn has come: in a loop, since each may end at once."""
        while self._advance:
            queue: deque[Call] = self._advance.popleft().ordered
            while queue and queue[0].done:
                queue.popleft()
            if queue and not queue[0].started:
                self._start(queue[0])

    def _cancel_request(self, client: ClientInfo, cancel: Cancel, _: object) -> HandlerResult:
        target = self._calls.get((client.session_id, cancel.request))
        if target is None and self._cancel_other is not None:
            return self._cancel_other.call(client, cancel, ())
        if target is None:
            return CancelReply(found=False)
        waiter: Promise[Message] = Promise()
        target.waiters.append(waiter)
        self._cancel(target)
        return waiter

    def _cancel(self, call: Call) -> None:
        call.cancelled = True
        if call.withdraw():
            if not call.answered:
                self._answer(call, errors.Cancelled("the request was cancelled", where=call.handler.spec.name))
            self._finish(call)
        elif call.future is not None:
            future, call.future = call.future, None  # asked once
            try:
                future.cancel()
            except Exception:
                logger.exception("cancelling %s failed", call.handler.spec.name)

    def _answer(self, call: Call, outcome: HandlerResult | BaseException) -> None:
        call.answered = True
        self._deadlines.discard(call.key)
        error = outcome if isinstance(outcome, BaseException) else self._send(call, outcome)
        name = call.handler.spec.name
        if error is not None:
            if isinstance(error, errors.HandlerFailed) or not isinstance(error, errors.KVFrameworkError):
                logger.error("the handler of %s failed", name, exc_info=error)
            self.routers.send_error(call.identity, call.request_id, error)
        self.took(name, call.received)

    def _send(self, call: Call, result: HandlerResult) -> Exception | None:
        spec = call.handler.spec
        payload, buffers = (result.payload, result.buffers) if isinstance(result, Reply) else (result, ())
        if not isinstance(payload, spec.response):
            what = f"the handler returned {type(payload).__name__}, not {spec.response.__name__}"
            return errors.HandlerFailed(what, where=spec.name)
        try:
            self.routers.send(call.identity, call.request_id, spec.name, payload, buffers)
        except Exception as error:  # noqa: BLE001 - any error of encoding; the caller logs and answers it
            return error
        return None
