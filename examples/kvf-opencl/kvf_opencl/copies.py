"""The transfers of one instance, from the request to the commit, in one thread that waits for nothing but news.

It knows no device: keep it as it is, and put your vendor's calls into `device.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from kvframework.api.copy_plans import CopyBatch
from kvframework.api.futures import Future, Promise
from kvframework.api.transport import ArenaRange, LoadOutcome, LoadPlan, StoreOutcome, StorePlan
from kvframework.errors import Cancelled, KVFrameworkError

from kvf_opencl.device import Device, Event

log = logging.getLogger(__name__)

R = TypeVar("R", StoreOutcome, LoadOutcome)
# A device without callbacks is asked this often.
POLL_S = 0.0005


class Copy(Generic[R]):
    """One transfer. It waits for the server's plan, then for the engine's event, is copied, then committed. `future`
    has an outcome at every end: it never fails. `borrowed` is referenced until then."""

    def __init__(
        self,
        device: Device,
        ready: Event,
        batches: Callable[[Sequence[ArenaRange]], Sequence[CopyBatch]],
        failed: Callable[[BaseException], R],
        borrowed: object,
        *,
        to_arena: bool,
    ) -> None:
        self.future: Promise[R] = Promise(self.cancel, stream_hook=device.block_stream)
        self.sent: Future[Any] = Future()
        self.wake: Callable[[], None] = lambda: None
        self.is_cancelled = False
        self._device = device
        self._ready = ready
        self._batches = batches
        self._failed: Callable[[BaseException], R] = failed
        self._borrowed = borrowed
        self._to_arena = to_arena
        self._plan: StorePlan | LoadPlan | None = None
        self._done: Event | None = None  # behind the copy, once that has begun
        self._error: KVFrameworkError | None = None

    def cancel(self) -> None:
        """Ends it at once while it waits for the server or the event, else when the copy is over. From any thread."""
        self.is_cancelled = True
        self.sent.cancel()  # what the answer still grants is given back
        self.wake()

    def waits_for_server(self) -> bool:
        return not self.sent.query()

    def go_on(self) -> bool:
        """Goes as far as it can now, and returns whether that was the end."""
        try:
            return self._went_on()
        except Exception as error:  # whatever fails: the engine goes on without the cache
            if not isinstance(error, KVFrameworkError):
                log.exception("a transfer failed")
            if self._plan is not None:
                self._plan.abort()
            self._ended(self._failed(error))
            return True

    def _went_on(self) -> bool:
        if self._plan is None:
            if not self.sent.query():
                return False
            self._plan = self.sent.result(0)  # raises the error of the request
        if self._done is None:
            if self.is_cancelled:
                raise Cancelled("the transfer was cancelled before its copy")
            if self._plan.ranges:  # a miss has none, nor has a store of what is there
                if self._device.reached(self._ready):
                    self._begin(self._plan)
                return False
        else:
            if not self._device.reached(self._done):
                return False
            if self._error is not None:
                raise self._error
            if self.is_cancelled:
                raise Cancelled("the transfer was cancelled during its copy")
        committed: Future[Any] = self._plan.commit()  # never fails
        committed.add_done_callback(lambda done: self._ended(done.result(0)))
        return True

    def _begin(self, plan: StorePlan | LoadPlan) -> None:
        try:
            for batch in self._batches(plan.ranges):
                self._device.copy(plan.arena, batch, to_arena=self._to_arena)
        except KVFrameworkError as error:
            self._error = error  # a part of it may be under way
        self._done = self._device.end_of_copies(to_arena=self._to_arena)

    def _ended(self, outcome: R) -> None:
        self._borrowed = None
        self.future.set_result(outcome)


class CopyQueue:
    """The transfers under way, and the thread that takes them on. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copies: list[Copy[Any]] = []
        self._later: list[tuple[Sequence[Copy[Any]], Callable[[], None]]] = []
        self._news = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self, copy: Copy[R], sent: Future[StorePlan] | Future[LoadPlan]) -> Future[R]:
        """Takes over a transfer whose request is sent. Never waits."""
        copy.sent, copy.wake = sent, self._wake
        with self._changed:
            self._copies.append(copy)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="opencl", daemon=True)
                self._thread.start()
        # Runs in this thread if the answer is there, else in the connection's, which must not be held up.
        sent.add_done_callback(lambda _: self._wake())
        return copy.future

    def when_idle(self, call: Callable[[], None]) -> None:
        """Calls `call` once the transfers of now are over: at once, or in the thread."""
        with self._changed:
            if self._copies:
                self._later.append((list(self._copies), call))
                return
        call()

    def close(self) -> None:
        """Cancels what waits, and waits for copies that have begun. Idempotent."""
        with self._changed:
            self._closed = True
            copies, thread, self._thread = list(self._copies), self._thread, None
        for copy in copies:
            copy.cancel()
        self._wake()
        if thread is not None:
            thread.join()

    def _wake(self) -> None:
        with self._changed:
            self._news = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed and not self._copies:
                    return
                if not self._news:
                    idle = all(copy.waits_for_server() for copy in self._copies)
                    self._changed.wait(None if idle else POLL_S)
                self._news = False
                copies = list(self._copies)
            ended = [copy for copy in copies if copy.go_on()]
            with self._changed:
                self._copies = [copy for copy in self._copies if copy not in ended]
                later = [each for each in self._later if not any(copy in self._copies for copy in each[0])]
                self._later = [each for each in self._later if each not in later]
            for _, call in later:
                try:
                    call()
                except KVFrameworkError:
                    log.exception("the device did not give memory back")
            del copies, ended, later  # and with them what they borrow
