"""One thread with an event loop, in which all requests of a tier are under way. Started by the first call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvf_s3.failures import CLOSED, LATE, Failure, understood
from kvframework.api.tier import Outcome, PackedKey

T = TypeVar("T")

_END_S = 2.0


class LoopThread:
    """Runs coroutines for other threads. Thread-safe. `background` runs from `begin_background` until `close`."""

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

    def begin_background(self) -> None:
        """Start `background`, if there is one. Does not block."""
        with self._lock:
            if self._background is not None and not self.closed:
                asyncio.run_coroutine_threadsafe(self._background(), self._started())

    def close(self) -> None:
        """Cancel what is under way and end the thread; blocks until that has ended, two seconds at most.
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


R = TypeVar("R")


async def ask_each(
    keys: Sequence[PackedKey], ask: Callable[[int], Awaitable[R | Failure]], *, at_once: int, deadline: float
) -> list[R | Failure]:
    """The answer of `ask` for each index of `keys`; for what has no answer by the deadline a `Failure`. Ends shortly
    after the deadline, when every request that was cancelled has ended."""
    answers: list[R | Failure] = [LATE] * len(keys)
    of_key: dict[PackedKey, list[int]] = {}
    for index, key in enumerate(keys):
        of_key.setdefault(key, []).append(index)
    waiting = iter(of_key.values())

    async def work() -> None:
        for indices in waiting:
            for index in indices:
                try:
                    answers[index] = await ask(index)
                except Exception as error:  # noqa: BLE001  a failure of one request is that key's
                    answers[index] = understood(error)

    workers = [asyncio.ensure_future(work()) for _ in range(min(at_once, len(keys)))]
    try:
        if workers:
            await asyncio.wait(workers, timeout=max(deadline - asyncio.get_running_loop().time(), 0.0))
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return answers


def settled(answers: Sequence[R | Outcome | Failure], where: str) -> list[R | Outcome]:
    """The answers, with FAILED for failures. Raises the `TierError` of the first failure if there is no answer at all,
    unless the store is just full."""
    failures = [each for each in answers if isinstance(each, Failure)]
    if failures and len(failures) == len(answers) and not all(each.full for each in failures):
        raise next(each for each in failures if not each.full).error(where)
    return [Outcome.FAILED if isinstance(each, Failure) else each for each in answers]
