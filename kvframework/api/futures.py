"""Owns `MessagingFuture`, the one future of the framework, and how streams of a device wait for it. Thread-safe;
resolved once, by whoever does the work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Generic, TypeVar

from kvframework.errors import Cancelled, DeadlineExceeded, DeviceError

log = logging.getLogger(__name__)
# A cache alone lets threads that come at once all through.
_telling = threading.RLock()

T = TypeVar("T")
# `EngineDriver.hold`.
Hold = Callable[[object | None], Callable[[], None]]


class MessagingFuture(Generic[T]):
    """The result of a request that may still be under way.

    `detail` carries what a plain `bool` cannot say (a STORE's `StoreOutcome`), `cause` the error that made it False.
    Callbacks run once, in the thread that resolves the future, or at once in the caller's thread when it is resolved
    already; they must not block.
    `hold` is set by a transport whose device can have its streams wait, see `EngineDriver.hold`.
    """

    __slots__ = ("_callbacks", "_cancel_hook", "_done", "_error", "_held", "_lock", "_value", "cause", "detail", "hold")

    def __init__(self, cancel_hook: Callable[[], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[MessagingFuture[T]], None]] = []
        # None once nothing may be held for it any more: it is resolved or overdue.
        self._held: list[Callable[[], None]] | None = []
        self._cancel_hook = cancel_hook
        self.detail: object = None
        self.cause: BaseException | None = None
        self.hold: Hold | None = None

    @classmethod
    def resolved(cls, value: T, detail: object = None) -> MessagingFuture[T]:
        """A future that has its result already."""
        future = cls()
        future.set_result(value, detail)
        return future

    @classmethod
    def failed(cls, error: BaseException) -> MessagingFuture[T]:
        """A future that has failed already."""
        future = cls()
        future.set_exception(error)
        return future

    def query(self) -> bool:
        """True once a result or an error is there. Never blocks."""
        return self._done.is_set()

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

    def add_done_callback(self, callback: Callable[[MessagingFuture[T]], None]) -> None:
        """Calls `callback(future)` once the future is resolved, at once if it already is."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    @property
    def may_hold(self) -> bool:
        """Whether a device may still be held for it: it is neither resolved nor overdue. Never blocks."""
        return self._held is not None

    def add_release(self, release: Callable[[], None]) -> None:
        """Calls `release()` once, when the future is resolved or overdue, at once if it already is; before callbacks,
        and with the same rules."""
        with self._lock:
            if self._held is not None:
                self._held.append(release)
                return
        release()

    def overdue(self) -> None:
        """Lets everything go that a device holds for this future, which stays pending: its deadline is over, and nobody
        knows yet how it ends. For whoever does the work; nothing if it is resolved or overdue already. Raises what a
        release raises, after all of them were called."""
        with self._lock:
            releases, self._held = self._held or [], None
        _call_all(releases)

    def cancel(self) -> None:
        """Asks whoever does the work to stop; the future is resolved as always once the work touches nothing any more.

        Without a cancel hook the future fails with `Cancelled` at once, since nothing can be in flight.
        """
        if self._cancel_hook is not None:
            self._cancel_hook()
        else:
            self.set_exception(Cancelled("the request was cancelled"))

    def to_cuda_future(self) -> DeviceFuture[T]:
        """The same result, for which the engine's streams can wait, on whatever device it is."""
        return DeviceFuture(self)

    def set_result(self, value: T, detail: object = None, *, cause: BaseException | None = None) -> bool:
        """Resolves the future; False if it was resolved before (the first result stays)."""
        return self._resolve(value, None, detail, cause)

    def set_exception(self, error: BaseException) -> bool:
        """Fails the future; False if it was resolved before."""
        return self._resolve(None, error, None)

    def _resolve(
        self, value: T | None, error: BaseException | None, detail: object, cause: BaseException | None = None
    ) -> bool:
        with self._lock:
            if self._done.is_set():
                return False
            self._value, self._error, self.detail, self.cause = value, error, detail, cause
            callbacks, self._callbacks = self._callbacks, []
            self._cancel_hook = None
            self._done.set()
            # Behind that: who finds that nothing may be held any more finds the result.
            releases, self._held = self._held or [], None
        _call_all([*releases, *(partial(callback, self) for callback in callbacks)])
        return True


class DeviceFuture(Generic[T]):
    """A transfer's future as an engine with a device uses it: its streams wait, and its threads go on.

    `MessagingFuture.to_cuda_future` makes it. All but `wait` is as there.
    """

    __slots__ = ("_future",)

    def __init__(self, future: MessagingFuture[T]) -> None:
        self._future = future

    @property
    def detail(self) -> object:
        return self._future.detail

    def query(self) -> bool:
        return self._future.query()

    def result(self, timeout: float | None = None) -> T:
        return self._future.result(timeout)

    def exception(self) -> BaseException | None:
        return self._future.exception()

    def cancel(self) -> None:
        self._future.cancel()

    def wait(self, stream: object | None = None) -> None:
        """Has all further work of `stream` (None: the calling thread's current one) wait until the transfer is over, or
        until the request's deadline at the longest: then the stream goes on, the future is pending, and the blocks are
        not to be trusted.

        It is over when it failed, too, which the stream cannot know: ask `result` before you trust what the blocks
        hold. Returns at once, and may be called for any number of streams, from any thread. Only where the device
        cannot hold a stream, or the transport is none of a device, the calling thread itself waits, as long as the
        stream would; that is logged once.
        """
        future = self._future
        if not future.may_hold:
            return
        try:
            if future.hold is None:
                raise DeviceError("the transport knows no streams")
            release = future.hold(stream)
        except DeviceError as error:
            with _telling:
                _tell_once(error.fact)
            released = threading.Event()
            future.add_release(released.set)
            released.wait()
            return
        future.add_release(release)


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
