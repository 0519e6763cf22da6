"""Owns how fast copies may follow each other in one direction of a device. Pure: told the time, on one clock."""

from __future__ import annotations


class Pace:
    """At most `bytes_per_s` (0: no bound): a launch waits until those before it have been paid for.

    Nothing is saved up while there is nothing to do, and whatever its size, one launch goes at a time: over any time t
    at most `bytes_per_s` x t bytes and one launch begin.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._paid = 0.0

    def left(self, now: float) -> float:
        """Seconds until the next launch may be, 0 if it may be now."""
        return max(self._paid - now, 0.0)

    def launched(self, nbytes: int, now: float) -> None:
        if self._bytes_per_s:
            self._paid = max(self._paid, now) + nbytes / self._bytes_per_s
