"""What a thread that polls needs: keys with deadlines, and an eventfd by which others wake it."""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

from kvframework.messaging.descriptors import close_after_fork

# A set of keys with deadlines. Pure: the time is passed in. Not thread-safe; each loop has its own.

K = TypeVar("K", bound=Hashable)
_SLACK = 64


class Deadlines(Generic[K]):
    """Gives the next deadline and the due keys in O(log n). Discarded keys leave the heap lazily."""

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, K]] = []

    def __len__(self) -> int:
        return len(self._when)

    def set(self, key: K, when: float) -> None:
        """Set or replace the deadline of `key`. Keys of equal deadline must be comparable."""
        self._when[key] = when
        heapq.heappush(self._heap, (when, key))

    def discard(self, key: K) -> None:
        self._when.pop(key, None)
        if len(self._heap) > _SLACK + 2 * len(self._when):
            self._heap = [(when, key) for key, when in self._when.items()]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """Return the earliest deadline, None if there is none."""
        heap = self._heap
        while heap and self._when.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline is `now` or earlier, earliest first."""
        keys = []
        while (when := self.next()) is not None and when <= now:
            key = heapq.heappop(self._heap)[1]
            del self._when[key]
            keys.append(key)
        return keys


class Wakeup:
    """`signal()` makes `fd` readable until `drain()`. Its lock is reentrant, so a signal handler may use it.

    The owner closes it: an object of a reference cycle, or of a traceback that is kept, would hold the descriptor until
    the garbage collector runs, which an engine may have switched off.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        close_after_fork(self)

    def signal(self) -> None:
        """Make `fd` readable. Never blocks. No effect after `close()`, so that a late call never hits a descriptor's
        next owner."""
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def drain(self) -> None:
        """Reset the signals so far. The caller drains before it checks what they announced."""
        with self._lock:
            if self.fd >= 0:
                try:
                    os.eventfd_read(self.fd)
                except BlockingIOError:
                    return

    def close(self) -> None:
        """Close the descriptor. Idempotent. The caller ensures that no thread polls `fd`."""
        with self._lock:
            fd, self.fd = self.fd, -1
            if fd >= 0:
                os.close(fd)

    def close_in_child(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self.close()
