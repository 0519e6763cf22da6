"""A tier whose loads take turns, as one more load finds it. Pure."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from itertools import accumulate

# No more than this share of a tier's time is expected to go to loads that come later: those see this one, and many of
# them leave theirs.
MOST_BUSY = 0.3


class Turns:
    """`left_s` are the seconds of work that are left of each load under way, `rate` the loads a second that come
    behind, and `busy` the share of the time that loads have taken. A load that needs less than the others is over
    before them, so of each it waits for as much as it has itself."""

    __slots__ = ("_busy", "_left", "_rate", "_sums")

    def __init__(self, left_s: Iterable[float] = (), rate: float = 0.0, busy: float = 0.0) -> None:
        self._left = sorted(left_s)
        self._sums = [0.0, *accumulate(self._left)]
        self._rate = rate
        self._busy = min(busy, MOST_BUSY)

    def load_s(self, work_s: float) -> float:
        """Return how long a load of `work_s` takes, with the turns of the others, and of those that come meanwhile."""
        return (self._waited_s(work_s) + work_s) / (1.0 - self._busy)

    def cost_to_others(self, work_s: float) -> float:
        """Return the seconds that others wait longer, together, for a load of `work_s`: those under way, each as long
        as this one waits for it, and those that come before it is over, each by `work_s`."""
        wait_s = self._waited_s(work_s)
        return wait_s + work_s * self._rate * (wait_s + work_s)

    def _waited_s(self, work_s: float) -> float:
        """Return for how long it waits for those under way, in all its turns."""
        shorter = bisect(self._left, work_s)
        return self._sums[shorter] + (len(self._left) - shorter) * work_s
