"""The delay before a process that ended is started again. Pure: the caller gives the time."""

from __future__ import annotations

FIRST_S, LONGEST_S = 0.1, 10.0
# After a life of this length, a process's end starts a new backoff.
HEALTHY_S = 30.0


class Backoff:
    """The delay before the next start, from every start and end on one clock."""

    def __init__(self, *, at_once: bool = False) -> None:
        """`at_once`: the first start after a healthy life waits for nothing."""
        self._least_s = 0.0 if at_once else FIRST_S
        self._wait_s = 0.0
        self._started = 0.0
        self._ended = 0.0

    def started(self, now: float) -> None:
        self._started = now

    def ended(self, now: float, *, served: bool = False) -> None:
        """Note that the process ended by itself or had to be killed. A life in which it `served` is a healthy one."""
        healthy = served or now - self._started >= HEALTHY_S
        self._wait_s = self._least_s if healthy else min(max(self._wait_s * 2, FIRST_S), LONGEST_S)
        self._ended = now

    def left(self, now: float) -> float:
        """Return the seconds until the next start may be, 0 if it may be now."""
        return max(self._ended + self._wait_s - now, 0.0)
