"""What arrives: requests a second and their work, of the last minutes; and a queue, with what one more request costs
the others. Pure, with the caller's clock."""

from __future__ import annotations

from math import exp
from typing import NamedTuple

HORIZON_S = 120.0
# At the begin this time counts as passed, so that two requests at once are no crowd.
LEAST_S = 5.0


class Queue(NamedTuple):
    """A queue as one request finds it: the seconds of work before it, and the requests a second that come behind it."""

    wait_s: float = 0.0
    rate: float = 0.0

    def cost_to_others(self, work_s: float) -> float:
        """Return the seconds that requests behind this one wait longer, together, if it brings `work_s` of work: those
        that come until the present queue and this work are over, each by `work_s`.

        That longer queues last longer, since more comes meanwhile, is left out: what comes later sees the queue and
        goes another way.
        """
        return work_s * self.rate * (self.wait_s + work_s)


class Traffic:
    """The requests of the last `HORIZON_S` seconds; what was a while ago counts less. Not thread-safe."""

    __slots__ = ("_at", "_began", "_count", "_work")

    def __init__(self, now: float) -> None:
        self._began = self._at = now
        self._count = self._work = 0.0

    def add(self, now: float, requests: int = 1, work: float = 0.0) -> None:
        """Count requests that have come since the last call, with their work in any unit."""
        self._decay(now)
        self._count += requests
        self._work += work

    def rate(self, now: float) -> float:
        """Return the requests a second."""
        seconds = self._seconds(now)
        return self._count / seconds

    def work(self, now: float) -> float:
        """Return the work a second."""
        seconds = self._seconds(now)
        return self._work / seconds

    def _seconds(self, now: float) -> float:
        """Return the seconds that the counts stand for."""
        self._decay(now)
        passed = max(self._at - self._began, LEAST_S)
        return HORIZON_S * (1.0 - exp(-passed / HORIZON_S))

    def _decay(self, now: float) -> None:
        if now > self._at:
            kept = exp((self._at - now) / HORIZON_S)
            self._count *= kept
            self._work *= kept
            self._at = now
