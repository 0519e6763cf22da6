"""Owns the choice of what leaves a full L2 tier: what was used longest ago. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from kvframework.api import PackedKey, TierEntry, TierUsage


@dataclass(frozen=True)
class Watermarks:
    """Fractions of a tier's capacity: above `high`, it is emptied down to `low`."""

    high: float = 0.95
    low: float = 0.85

    def excess(self, usage: TierUsage, sizes: Iterable[int]) -> int:
        """Bytes to delete before values of `sizes` are written, 0 if there is room. For one that the whole tier could
        not hold, nothing needs to leave."""
        wanted = usage.used_bytes + sum(nbytes for nbytes in sizes if nbytes <= self.high * usage.capacity_bytes)
        if wanted <= self.high * usage.capacity_bytes:
            return 0
        return max(wanted - int(self.low * usage.capacity_bytes), 0)

    def at_once(self, usage: TierUsage, sizes: Iterable[int]) -> int:
        """How many values, the first of `sizes`, may be written before room is made again: what fits below `low`, at
        least one. Those that the whole tier could not hold take no room."""
        room, number = self.low * usage.capacity_bytes, 0
        for nbytes in sizes:
            if nbytes <= self.high * usage.capacity_bytes:
                room -= nbytes
                if room < 0 and number:
                    break
            number += 1
        return number


def oldest(entries: Iterable[TierEntry], nbytes: int) -> list[PackedKey]:
    """The keys used longest ago that hold at least `nbytes` together. Holds no more than it returns, and one."""
    heap: list[tuple[float, int, TierEntry]] = []
    held = 0
    for number, entry in zip(itertools.count(), entries):
        heapq.heappush(heap, (-entry.used_at, number, entry))
        held += entry.nbytes
        while heap and held - heap[0][2].nbytes >= nbytes:
            held -= heapq.heappop(heap)[2].nbytes
    return [entry.key for _, _, entry in sorted(heap, reverse=True)]
