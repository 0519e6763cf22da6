"""The futures of the framework: `Future` for the waiting side, `Promise` for the working side. Thread-safe."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from kvframework.errors import Cancelled, DeadlineExceeded, DeviceError
from kvframework.logs.limit import LogLimit

__all__ = ["AdvanceHook", "DeviceFuture", "Future", "Promise", "StreamHook"]

log = logging.getLogger(__name__)
_once = LogLimit.once()

T = TypeVar("T")
# `EngineDriver.block_stream`.
StreamHook = Callable[[object | None], Callable[[], None]]
# `Future.advance`.
AdvanceHook = Callable[[int | None], int]


class Future(Generic[T]):
    """The result of work that may still be running. Callbacks run once, in the thread that resolves the future, or at
    once in the caller's thread when it is resolved already; they must not block."""

    __slots__ = (
        "_advance_hook",
        "_callbacks",
        "_cancel_hook",
        "_done",
        "_error",
        "_held",
        "_lock",
        "_stream_hook",
        "_value",
        "_waited_for",
    )

    def __init__(
        self,
        cancel_hook: Callable[[], None] | None = None,
        *,
        stream_hook: StreamHook | None = None,
        advance_hook: AdvanceHook | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._done = False
        # Made by the first thread that has to wait: most futures are resolved before anybody does.
        self._waited_for: threading.Event | None = None
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future[T]], object]] = []
        # None once no new hold is accepted: the future is resolved, or its holds have expired.
        self._held: list[Callable[[], None]] | None = []
        self._cancel_hook = cancel_hook
        self._stream_hook = stream_hook
        self._advance_hook = advance_hook

    @classmethod
    def resolved(cls, value: T) -> Future[T]:
        """Return a future that already has its result."""
        future = cls()
        future._resolve(value, None)
        return future

    @classmethod
    def failed(cls, error: BaseException) -> Future[T]:
        """Return a future that has already failed."""
        future = cls()
        future._resolve(None, error)
        return future

    def query(self) -> bool:
        """Return True once there is a result or an error. Never blocks."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds (None: no limit), and return whether the future is resolved."""
        with self._lock:
            if self._done:
                return True
            waited_for = self._waited_for = self._waited_for or threading.Event()
        return waited_for.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """Return the value, waiting at most `timeout` seconds (None: no limit). Raises `DeadlineExceeded` when the
        time is over (the future stays pending), or the error with which the work failed."""
        if not self.wait(timeout):
            raise DeadlineExceeded(f"the request gave no result within {timeout} s")
        if self._error is not None:
            error = self._error
            try:
                raise error
            finally:
                # The traceback refers to this frame: a cycle would keep the caller's buffers until it is collected.
                del self, error
        return self._value  # type: ignore[return-value]

    def exception(self) -> BaseException | None:
        """Return the error of a failed future, None while pending and on success. Never blocks."""
        return self._error

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call `callback(future)` once the future is resolved, at once if it already is."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def cancel(self) -> None:
        """Ask for the end of the work; the future is resolved as always once the work touches no memory any more.
        Without a cancel hook nothing can be in flight, and the future fails with `Cancelled` at once."""
        hook = self._cancel_hook  # once: another thread may resolve the future meanwhile
        if hook is not None:
            hook()
        else:
            self._resolve(None, Cancelled("the request was cancelled"))

    def advance(self, nbytes: int | None = None) -> int:
        """Do the next piece of work that waits for the owner's thread, such as a load in pieces: `nbytes` bytes at
        most, though never less than its smallest piece; None: all that is left. Returns the bytes that were moved.
        Blocks for the piece. Returns 0 at once if there is nothing to do here now, as for most work."""
        hook = self._advance_hook
        return hook(nbytes) if hook is not None else 0

    def to_cuda_future(self) -> DeviceFuture[T]:
        """Return a future of the same result, for which device streams can wait. Never blocks."""
        return DeviceFuture(self)

    def _resolve(self, value: T | None, error: BaseException | None) -> bool:
        with self._lock:
            if self._done:
                return False
            self._value, self._error = value, error
            callbacks, self._callbacks = self._callbacks, []
            self._cancel_hook = self._advance_hook = None
            self._done = True
            if self._waited_for is not None:
                self._waited_for.set()
            # After the result is set: a thread that finds no hold accepted any more also finds the result.
            releases, self._held = self._held or [], None
        _call_all([*releases, *(partial(callback, self) for callback in callbacks)])
        return True

    def _add_release(self, release: Callable[[], None]) -> None:
        """Has `release()` called once, when the future is resolved or its holds expire, at once if that is past; before
        callbacks, and with the same rules."""
        with self._lock:
            if self._held is not None:
                self._held.append(release)
                return
        release()


class Promise(Future[T]):
    """A future as seen by the worker behind it, which resolves it once. `cancel_hook` is called by `cancel`, in any
    thread, and must not block. `stream_hook` makes a stream of the device wait, see `EngineDriver.block_stream`.
    `advance_hook` does what `advance` says; work that goes on by itself has none."""

    __slots__ = ()

    def set_result(self, value: T) -> bool:
        """Resolve the future; False if it was resolved before (the first result stays)."""
        return self._resolve(value, None)

    def set_exception(self, error: BaseException) -> bool:
        """Fail the future; False if it was resolved before (the first result stays)."""
        return self._resolve(None, error)

    def expire_holds(self) -> None:
        """End the wait of all streams that are blocked for this future, which stays pending: its deadline has passed,
        and its outcome is not known yet. Idempotent. Raises an error of a release, after all releases were called."""
        with self._lock:
            releases, self._held = self._held or [], None
        _call_all(releases)


class DeviceFuture(Generic[T]):
    """A transfer's future as an engine with a device uses it: its streams wait, and its threads go on. All methods but
    `wait` are those of `Future`."""

    __slots__ = ("_future", "cancel", "exception", "query", "result")

    def __init__(self, future: Future[T]) -> None:
        self._future = future
        self.query, self.result = future.query, future.result
        self.exception, self.cancel = future.exception, future.cancel

    def wait(self, stream: object | None = None) -> None:
        """Block all further work of `stream` (None: the calling thread's current one), on the device, until the
        transfer is over, also by a failure, or until the request's deadline at the longest, when the future is still
        pending: ask `result` before you trust the blocks.

        Returns at once, and may be called for any number of streams, from any thread. Where the device cannot block a
        stream, or the transport has no device, the calling thread itself waits instead; that is logged once.
        """
        future = self._future
        if future._held is None:
            return
        try:
            if future._stream_hook is None:
                raise DeviceError("the transport does not support streams")
            release = future._stream_hook(stream)
        except DeviceError as error:
            if _once.passes(error.fact):
                log.warning("streams cannot wait for a transfer, so the engine's thread waits: %s", error.fact)
            released = threading.Event()
            future._add_release(released.set)
            released.wait()
            return
        future._add_release(release)


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    """Call all, then raise the first error: a stream may wait for one of the later calls."""
    failed: BaseException | None = None
    for call in calls:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  see above
            failed = failed or error
    if failed is not None:
        raise failed
