"""What arrives at a queue: requests a second, as learned, and what one more costs the others. Pure, with the caller's
clock."""

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

    __slots__ = ("_at", "_began", "_count")

    def __init__(self, now: float) -> None:
        self._began = self._at = now
        self._count = 0.0

    def add(self, now: float, requests: int = 1) -> None:
        """Count requests that have come since the last call."""
        self._decay(now)
        self._count += requests

    def rate(self, now: float) -> float:
        """Return the requests a second."""
        self._decay(now)
        passed = max(self._at - self._began, LEAST_S)
        return self._count / (HORIZON_S * (1.0 - exp(-passed / HORIZON_S)))

    def _decay(self, now: float) -> None:
        if now > self._at:
            self._count *= exp((self._at - now) / HORIZON_S)
            self._at = now
