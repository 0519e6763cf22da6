"""A set of keys with deadlines. Pure: the time is passed in. Not thread-safe; each loop has its own."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

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
