"""The speed of one tier: bytes a second, learned from finished loads, and the bytes that wait to be loaded. Pure, with
the caller's clock and lock.

Loads that run at once share a tier. Each is charged the time in which it had the tier to itself, so to say: of a second
in which two run, half a second. The sum of the charges is the time in which the tier was busy at all, so bytes by
charges are what the tier as a whole brings a second, whatever runs at once.
"""

from __future__ import annotations

from typing import NamedTuple

from kvframework.pricing.rates import LearnedPrice
from kvframework.pricing.traffic import Queue, Traffic

# A tier whose speed was last seen so long ago gets a load that its price is against, to learn whether it recovered.
PROBE_S = 15.0


class Load(NamedTuple):
    """A load that has begun: its bytes, and when, by the tier's clock of charges and by the caller's."""

    nbytes: int
    charged: float
    began: float


class TierSpeed:
    """See the module."""

    def __init__(self, now: float) -> None:
        self.queued_bytes = 0
        self._price = LearnedPrice()
        self._traffic = Traffic(now)
        self._running = 0
        # Seconds that a load charges which runs since the begin, and when that was last right.
        self._charged = 0.0
        self._at = now
        self._probed_at = now

    def begin(self, nbytes: int, now: float) -> Load:
        """Begin a load of so many bytes; `end` ends it."""
        self._charge(now)
        self._running += 1
        return Load(nbytes, self._charged, now)

    def end(self, load: Load, now: float, *, loaded: int) -> None:
        """End a load, which brought `loaded` bytes; nothing is learned from one that brought only a part."""
        self._charge(now)
        self._running -= 1
        if loaded == load.nbytes:
            self._price.add(max(self._charged - load.charged, 0.0), loaded, began=load.began, now=now)

    @property
    def byte_s(self) -> float | None:
        """The seconds that a byte takes, None while that is not known."""
        prices = self._price.prices
        return None if prices is None else prices[0]

    def chosen(self, nbytes: int, now: float) -> None:
        """Count a request that loads so many bytes, which wait until `gone`."""
        self.queued_bytes += nbytes
        self._traffic.add(now)

    def gone(self, nbytes: int) -> None:
        """So many bytes wait no longer: loaded, or given up."""
        self.queued_bytes -= nbytes

    def queue(self, now: float) -> Queue:
        """Return the queue that a load finds."""
        return Queue(self.queued_bytes * (self.byte_s or 0.0), self._traffic.rate(now))

    def probe(self, now: float) -> bool:
        """Whether a load is due that the price is against; True once in `PROBE_S`."""
        if now - max(self._price.last_at, self._probed_at) < PROBE_S:
            return False
        self._probed_at = now
        return True

    def _charge(self, now: float) -> None:
        if self._running:
            self._charged += max(now - self._at, 0.0) / self._running
        self._at = max(now, self._at)
