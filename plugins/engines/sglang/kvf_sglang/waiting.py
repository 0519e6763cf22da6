"""What SGLang's scheduler asks a linker at every step, without waiting for it: whether stores have ended, which run one
after the other in a thread, and what was found for a request that waits."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

# SGLang holds a node's device memory until its offload has ended.
MOST_WAITING = 64


class Offloads:
    """A queue of calls, whose results are taken in the order of their submission. Thread-safe."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], bool] | None] = queue.Queue()
        self._ended: deque[bool] = deque()
        self._thread: threading.Thread | None = None

    def submit(self, store: Callable[[], bool]) -> bool:
        """False if too many wait already, or no thread can be started. Never blocks."""
        if self._queue.qsize() >= MOST_WAITING:
            return False
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvf-sglang-offload", daemon=True)
            thread.start()
            self._thread = thread
        self._queue.put(store)
        return True

    @property
    def ended(self) -> int:
        return len(self._ended)

    def pop(self) -> bool:
        """The result of the oldest one that has ended; False if there is none."""
        return self._ended.popleft() if self._ended else False

    def quiesce(self) -> None:
        """Wait for all, each of which has a deadline of its own, and drop their results."""
        self._queue.join()
        self._ended.clear()

    def close(self) -> None:
        """Wait for all, and end the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        while (store := self._queue.get()) is not None:
            try:
                stored = store()
            except Exception as error:
                log.error("an offload failed: %r", error, exc_info=error)
                stored = False
            self._ended.append(stored)
            self._queue.task_done()
        self._queue.task_done()


# How long the scheduler waits for an answer.
LOOKUP_S = 0.1
MISS_HOLDS_S = 0.5
# Well before the pins of a hit end.
HIT_HOLDS_S = 10.0
MOST_REQUESTS = 4096


class RecentLookups:
    """Answers of lookups by request. For one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, tuple[str, str, int], list[int]]] = {}

    def get(self, request: str, keys: Sequence[str], ask: Callable[[], list[int]]) -> list[int]:
        """The answer for these keys: a recent one, or that of `ask`."""
        now, asked = self._clock(), (keys[0], keys[-1], len(keys))
        until, known, answer = self._known.get(request, (now, None, []))
        if known != asked or until <= now:
            answer = ask()
            self.forget(request)
            if len(self._known) >= MOST_REQUESTS:
                del self._known[next(iter(self._known))]
            self._known[request] = (now + (HIT_HOLDS_S if answer else MISS_HOLDS_S), asked, answer)
        return answer

    def forget(self, request: str) -> None:
        self._known.pop(request, None)
