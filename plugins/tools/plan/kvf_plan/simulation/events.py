"""Virtual time: what happens, in the order of its time; and a way to a tier or from it, as a rate: bytes go one after
the other, and the rate may be less for a while. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from kvf_plan.simulation.settings import SlowTime

Event = Callable[[], object]


class VirtualTime:
    """The clock of a simulation, which stands still while an event happens and jumps to the next one. Times are in
    seconds, and never go back."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._events: list[tuple[float, int, Event]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._events)

    def clock(self) -> float:
        return self.now

    def at(self, when: float, event: Event) -> None:
        """Let `event` happen at `when`, at once if that has passed; of several at one time the first added is the
        first. Raises `ValueError` for a time that is none."""
        if not when < math.inf:
            raise ValueError(f"an event at {when}")
        self._added += 1
        heapq.heappush(self._events, (max(when, self.now), self._added, event))

    def next_at(self) -> float:
        """Return the time of the next event; infinite if there is none."""
        return self._events[0][0] if self._events else math.inf

    def happen(self) -> None:
        """Let the next event happen, at its time. There must be one."""
        self.now = self._events[0][0]
        # No name for the event: an error that came through this frame, and is in the event, would keep itself.
        heapq.heappop(self._events)[2]()


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
