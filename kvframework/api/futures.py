"""The futures of the framework: `Future` for those who wait, `Promise` for those who do the work. Thread-safe."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Generic, TypeVar

from kvframework.errors import Cancelled, DeadlineExceeded, DeviceError

__all__ = [
    "DeviceFuture",
    "Future",
    "Promise",
    "StreamHook",
]

log = logging.getLogger(__name__)
# A cache alone lets threads that come at once all through.
_telling = threading.RLock()

T = TypeVar("T")
# `EngineDriver.block_stream`.
StreamHook = Callable[[object | None], Callable[[], None]]


class Future(Generic[T]):
    """The result of work that may still be under way.

    Callbacks run once, in the thread that resolves the future, or at once in the caller's thread when
    it is resolved already; they must not block.
    """

    __slots__ = ("_callbacks", "_cancel_hook", "_done", "_error", "_held", "_lock", "_stream_hook", "_value")

    def __init__(self, cancel_hook: Callable[[], None] | None = None, *, stream_hook: StreamHook | None = None) -> None:
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future[T]], None]] = []
        # None once nothing may be held for it any more: it is resolved, or its holds have expired.
        self._held: list[Callable[[], None]] | None = []
        self._cancel_hook = cancel_hook
        self._stream_hook = stream_hook

    @classmethod
    def resolved(cls, value: T) -> Future[T]:
        """A future that has its result already."""
        future = cls()
        future._resolve(value, None)
        return future

    @classmethod
    def failed(cls, error: BaseException) -> Future[T]:
        """A future that has failed already."""
        future = cls()
        future._resolve(None, error)
        return future

    def query(self) -> bool:
        """True once a result or an error is there. Never blocks."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the future is resolved, at most `timeout` seconds (None: without end); whether it is."""
        return self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """The value, waiting at most `timeout` seconds (None: without end).

        Raises `DeadlineExceeded` when the time is over (the future stays pending), or the error it failed with.
        """
        if not self._done.wait(timeout):
            raise DeadlineExceeded(f"no result within {timeout} s")
        if self._error is not None:
            error = self._error
            try:
                raise error
            finally:
                # The traceback refers to this frame: a cycle would keep the caller's buffers until it is collected.
                del self, error
        return self._value  # type: ignore[return-value]

    def exception(self) -> BaseException | None:
        """The error of a failed future, None while pending and on success. Never blocks."""
        return self._error

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Calls `callback(future)` once the future is resolved, at once if it already is."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def cancel(self) -> None:
        """Asks for the end of the work; the future is resolved as always once the work touches nothing any more.

        Without a cancel hook the future fails with `Cancelled` at once, since nothing can be in flight.
        """
        if self._cancel_hook is not None:
            self._cancel_hook()
        else:
            self._resolve(None, Cancelled("the request was cancelled"))

    def to_cuda_future(self) -> DeviceFuture[T]:
        """The same result, for which the engine's streams can wait, on whatever device it is."""
        return DeviceFuture(self)

    def _resolve(self, value: T | None, error: BaseException | None) -> bool:
        with self._lock:
            if self._done.is_set():
                return False
            self._value, self._error = value, error
            callbacks, self._callbacks = self._callbacks, []
            self._cancel_hook = None
            self._done.set()
            # Behind that: who finds that nothing may be held any more finds the result.
            releases, self._held = self._held or [], None
        _call_all([*releases, *(partial(callback, self) for callback in callbacks)])
        return True

    def _add_release(self, release: Callable[[], None]) -> None:
        with self._lock:
            if self._held is not None:
                self._held.append(release)
                return
        release()


class Promise(Future[T]):
    """A future as the worker behind it sees it: it resolves the future, once.

    `cancel_hook` is called by `cancel`, in any thread, and must not block. `stream_hook` makes a
    stream of the device wait, see `EngineDriver.block_stream`; a future of a transport without a
    device has none.
    """

    __slots__ = ()

    def set_result(self, value: T) -> bool:
        """Resolves the future; False if it was resolved before (the first result stays)."""
        return self._resolve(value, None)

    def set_exception(self, error: BaseException) -> bool:
        """Fails the future; False if it was resolved before."""
        return self._resolve(None, error)

    def add_release(self, release: Callable[[], None]) -> None:
        """Calls `release()` once, when the future is resolved or its holds expire, at once if that is past; before
        callbacks, and with the same rules."""
        self._add_release(release)

    def expire_holds(self) -> None:
        """Ends the wait of all streams that are blocked for this future, which stays pending: its deadline is over,
        and how it ends is not known yet. Does nothing once it is resolved, or a second time. Raises what a release
        raises, after all of them were called."""
        with self._lock:
            releases, self._held = self._held or [], None
        _call_all(releases)


class DeviceFuture(Generic[T]):
    """A transfer's future as an engine with a device uses it: its streams wait, and its threads go on.

    `Future.to_cuda_future` makes it. All but `wait` is as there.
    """

    __slots__ = ("_future",)

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def query(self) -> bool:
        return self._future.query()

    def result(self, timeout: float | None = None) -> T:
        return self._future.result(timeout)

    def exception(self) -> BaseException | None:
        return self._future.exception()

    def cancel(self) -> None:
        self._future.cancel()

    def wait(self, stream: object | None = None) -> None:
        """Blocks all further work of `stream` (None: the calling thread's current one), on the device, until the
        transfer is over, or until the request's deadline at the longest: then the stream goes on, the future is
        pending, and the blocks are not to be trusted.

        It is over when it failed, too, which the stream cannot know: ask `result` before you trust what the blocks
        hold. Returns at once, and may be called for any number of streams, from any thread. Only where the device
        cannot block a stream, or the transport is none of a device, the calling thread itself waits, as long as the
        stream would; that is logged once.
        """
        future = self._future
        if future._held is None:
            return
        try:
            if future._stream_hook is None:
                raise DeviceError("the transport knows no streams")
            release = future._stream_hook(stream)
        except DeviceError as error:
            with _telling:
                _tell_once(error.fact)
            released = threading.Event()
            future._add_release(released.set)
            released.wait()
            return
        future._add_release(release)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    """Raises the first of what they raise, once all were called: a stream may wait for one of them."""
    failed: BaseException | None = None
    for call in calls:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  see above
            failed = failed or error
    if failed is not None:
        raise failed


@lru_cache(maxsize=16)
def _tell_once(reason: str) -> None:
    log.warning("no stream can wait for a transfer, so the engine's thread does: %s", reason)
