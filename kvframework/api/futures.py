"""Owns `MessagingFuture`, the one future of the framework. Thread-safe; resolved once, by whoever does the work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvframework.errors import Cancelled, DeadlineExceeded

T = TypeVar("T")


class MessagingFuture(Generic[T]):
    """The result of a request that may still be under way.

    `detail` carries what a plain `bool` cannot say (a STORE's per-chunk outcomes). Callbacks run once, in the
    thread that resolves the future, or at once in the caller's thread when it is resolved already; they must not block.
    """

    __slots__ = ("_callbacks", "_cancel_hook", "_done", "_error", "_lock", "_value", "detail")

    def __init__(self, cancel_hook: Callable[[], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[MessagingFuture[T]], None]] = []
        self._cancel_hook = cancel_hook
        self.detail: object = None

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

    def cancel(self) -> None:
        """Asks whoever does the work to stop; the future is resolved as always once the work touches nothing any more.

        Without a cancel hook the future fails with `Cancelled` at once, since nothing can be in flight.
        """
        if self._cancel_hook is not None:
            self._cancel_hook()
        else:
            self.set_exception(Cancelled("the request was cancelled"))

    def set_result(self, value: T, detail: object = None) -> bool:
        """Resolves the future; False if it was resolved before (the first result stays)."""
        return self._resolve(value, None, detail)

    def set_exception(self, error: BaseException) -> bool:
        """Fails the future; False if it was resolved before."""
        return self._resolve(None, error, None)

    def _resolve(self, value: T | None, error: BaseException | None, detail: object) -> bool:
        with self._lock:
            if self._done.is_set():
                return False
            self._value, self._error, self.detail = value, error, detail
            callbacks, self._callbacks = self._callbacks, []
            self._cancel_hook = None
            self._done.set()
        for callback in callbacks:
            callback(self)
        return True
