"""One thread with an event loop, in which all requests of a tier are under way. Started by the first call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvf_s3.failures import CLOSED

T = TypeVar("T")

_END_S = 2.0


class LoopThread:
    """Runs coroutines for other threads. Thread-safe. `background` runs beside them until `close`."""

    def __init__(self, name: str, background: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        self._name = name
        self._background = background
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.closed = False

    def run(self, work: Callable[[], Coroutine[Any, Any, T]], *, where: str) -> T:
        """Blocks until the coroutine that `work` makes has ended. Raises `TierError` once closed."""
        with self._lock:
            future = None if self.closed else asyncio.run_coroutine_threadsafe(work(), self._started())
        if future is not None:
            try:
                return future.result()
            except concurrent.futures.CancelledError:
                pass
        raise CLOSED.error(where)

    def close(self) -> None:
        """Cancels what is under way and ends the thread; blocks until that has ended, two seconds at most.
        Idempotent."""
        with self._lock:
            first, self.closed = not self.closed, True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        if first:
            ended = asyncio.run_coroutine_threadsafe(_cancel_others(), loop)
            ended.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
        thread.join(_END_S)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
            if self._background is not None:
                asyncio.run_coroutine_threadsafe(self._background(), self._loop)
        return self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
