"""The stack of evicted bytes: how many bytes have left L1 since an object left, without those that came back. Pure.

Under a policy by recency, the objects of L1 and then those that left it, the last first, are the stack of a larger L1:
an object would still be there if L1 were larger by the bytes that were evicted from it on and have not come back.

The stack is kept in segments of about equal bytes, so it is right to a fraction of a segment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

# Segments, before neighbours that have become small are merged.
_MOST_SEGMENTS = 512


class EvictedStack:
    """Bytes are counted in units of the caller. `segment` is the size of a segment; what is deeper than `reach` is
    forgotten. A place is a number from 1, larger for what left later."""

    def __init__(self, segment: int, reach: int) -> None:
        self._segment = max(segment, 1)
        self._reach = reach
        self._top = 1
        # Of each segment, the oldest first: the place where it begins, and the units in it that have not come back.
        self._starts = [1]
        self._live = [0]
        self._taken = 0

    @property
    def pushed(self) -> int:
        """The units that were ever added."""
        return self._top - 1

    @property
    def moved(self) -> int:
        """The units that were ever added or removed: how far earlier `places` may be from those of now."""
        return self.pushed + self._taken

    def push(self, units: int) -> int:
        """Add the units of an object that is evicted; return its place."""
        place = self._top
        self._top += units
        self._live[-1] += units
        if self._top - self._starts[-1] >= self._segment:
            self._starts.append(self._top)
            self._live.append(0)
            if len(self._starts) > _MOST_SEGMENTS:
                self._merge()
        return place

    def take(self, place: int, units: int) -> None:
        """Remove the units of an object that came back, from the place that `push` returned."""
        if place >= self._starts[0]:
            self._live[bisect_right(self._starts, place) - 1] -= units
            self._taken += units

    def places(self, depths: Sequence[int]) -> list[int]:
        """Return, for each number of units, the place from which on so many have not come back: an object that left at
        this place or later would be in an L1 that is larger by as much. `depths` ascend."""
        newest_first = self._live[::-1]
        sums = list(accumulate(newest_first))
        places = []
        for depth in depths:
            at = bisect_left(sums, depth)
            if at == len(sums):
                places.append(self._starts[0])
                continue
            index = len(sums) - 1 - at
            begin = self._starts[index]
            end = self._starts[index + 1] if at else self._top
            over = (sums[at] - depth) / newest_first[at] if newest_first[at] else 0.0
            places.append(begin + round((end - begin) * over))
        return places

    def _merge(self) -> None:
        """Merge neighbours that are together no larger than a segment, and forget what is beyond the reach."""
        starts, live = [self._starts[-1]], [self._live[-1]]
        total = live[0]
        for start, units in zip(self._starts[-2::-1], self._live[-2::-1], strict=True):
            if total > self._reach:
                break
            total += units
            if len(live) > 1 and live[-1] + units <= self._segment:
                starts[-1] = start
                live[-1] += units
            else:
                starts.append(start)
                live.append(units)
        self._starts, self._live = starts[::-1], live[::-1]
