"""A way to a tier or from it, as a rate: bytes go one after the other, and the rate may be less for a while. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvf_plan.simulation.settings import SlowTime


class Waiting:
    """Until when the step lasts that is being taken."""

    def __init__(self) -> None:
        self._until = -math.inf

    def until(self, when: float) -> None:
        self._until = max(self._until, when)

    def take(self) -> float:
        """Return the time, and forget it."""
        until, self._until = self._until, -math.inf
        return until


class Channel:
    """First come, first served. `bytes_per_s` may be infinite; `slow` are times of the clock, in any order. `busy_s`
    is how long it was in use."""

    def __init__(self, bytes_per_s: float, slow: Sequence[SlowTime] = ()) -> None:
        self.free_at = -math.inf
        self.busy_s = 0.0
        self.nbytes = 0
        self._rate = bytes_per_s
        self._slow = slow
        self._changes = sorted({when for each in slow for when in (each.begin_s, each.end_s)})

    def send(self, nbytes: int, now: float, deadline: float = math.inf) -> float:
        """Send bytes as soon as those before them are through; return when they are. If that is after the deadline,
        what is sent until then was in vain."""
        begin = max(now, self.free_at)
        end = self._end(nbytes, begin)
        if begin < deadline:
            self.free_at = min(end, deadline)
            self.busy_s += self.free_at - begin
            if end <= deadline:
                self.nbytes += nbytes
        return end

    def _end(self, nbytes: float, at: float) -> float:
        if not self._changes:
            return at + nbytes / self._rate
        for change in self._changes:
            if change <= at:
                continue
            rate = self._rate_at(at)
            most = rate * (change - at) if rate else 0.0
            if most >= nbytes:
                break
            nbytes -= most
            at = change
        rate = self._rate_at(at)
        return at + nbytes / rate if rate else math.inf

    def _rate_at(self, when: float) -> float:
        factors = [each.factor for each in self._slow if each.begin_s <= when < each.end_s]
        return self._rate * min(factors, default=1.0)
