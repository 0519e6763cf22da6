"""What SGLang's scheduler asks a linker at every step, without waiting for it: whether stores have ended, which run one
after the other in a thread, and what was found for a request that waits."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

log = logging.getLogger(__name__)

# SGLang holds a node's device memory until its offload has ended.
MOST_WAITING = 64


class Offloads:
    """Calls one after the other, whose results are taken in the order of their submission. For one thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "kvf-sglang-offload")
        self._submitted: deque[Future[bool]] = deque()

    def submit(self, store: Callable[[], bool]) -> bool:
        """False if too many wait already. Never blocks."""
        if len(self._submitted) - self.ended > MOST_WAITING:
            return False
        self._submitted.append(self._pool.submit(store))
        return True

    @property
    def ended(self) -> int:
        return sum(each.done() for each in self._submitted)

    def pop(self) -> bool:
        """The result of the oldest one, False if that has not ended."""
        if not self.ended:
            return False
        oldest = self._submitted.popleft()
        error = oldest.exception()
        if error is not None:
            log.error("storing pages failed: %r", error, exc_info=error)
        return error is None and oldest.result()

    def quiesce(self) -> None:
        """Wait for all, each of which has a separate deadline, and drop their results."""
        wait(self._submitted)
        self._submitted.clear()

    def close(self) -> None:
        """Wait for all, and end the thread. Idempotent."""
        self._pool.shutdown()


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
