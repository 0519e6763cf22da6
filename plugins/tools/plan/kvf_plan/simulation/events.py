"""Virtual time: what happens, in the order of its time. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

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
