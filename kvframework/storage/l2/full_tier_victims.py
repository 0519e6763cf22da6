"""The choice of victims in a full L2 tier: least recently used first. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from kvframework.api.tier import PackedKey, TierEntry, TierUsage


@dataclass(frozen=True)
class Watermarks:
    """Fractions of a tier's capacity: above `high`, values are deleted down to `low`."""

    high: float = 0.95
    low: float = 0.85

    def excess(self, usage: TierUsage, sizes: Iterable[int]) -> int:
        """Return the bytes to delete before values of `sizes` are written, 0 if there is room. Values larger than the
        whole tier are ignored."""
        wanted = usage.used_bytes + sum(nbytes for nbytes in sizes if nbytes <= self.high * usage.capacity_bytes)
        if wanted <= self.high * usage.capacity_bytes:
            return 0
        return max(wanted - int(self.low * usage.capacity_bytes), 0)

    def at_once(self, usage: TierUsage, sizes: Iterable[int]) -> int:
        """Return how many values, the first of `sizes`, may be written before room is made again: those that fit below
        `low`, at least one. Values larger than the whole tier take no room."""
        room, number = self.low * usage.capacity_bytes, 0
        for nbytes in sizes:
            if nbytes <= self.high * usage.capacity_bytes:
                room -= nbytes
                if room < 0 and number:
                    break
            number += 1
        return number


def oldest(entries: Iterable[TierEntry], nbytes: int) -> list[PackedKey]:
    """Return the least recently used keys with at least `nbytes` in total. Memory is bounded by the result and one
    entry."""
    heap: list[tuple[float, int, TierEntry]] = []
    held = 0
    for number, entry in zip(itertools.count(), entries):
        heapq.heappush(heap, (-(entry.used_at or 0.0), number, entry))
        held += entry.nbytes
        while heap and held - heap[0][2].nbytes >= nbytes:
            held -= heapq.heappop(heap)[2].nbytes
    return [entry.key for _, _, entry in sorted(heap, reverse=True)]
