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

# A tier from which nothing was loaded for so long gets a load that its price is against, so that one that is quick again
# is used again.
PROBE_S = 15.0


class Load:
    """A call that loads: its bytes, and when it began, by the tier's clock of charges and by the caller's."""

    __slots__ = ("began", "charged", "nbytes")

    def __init__(self, nbytes: int, charged: float, began: float) -> None:
        self.nbytes = nbytes
        self.charged = charged
        self.began = began


class Offer(NamedTuple):
    """What a tier offers now: the seconds for a byte and for a call, None while they are not known; its queue; and
    whether a load is due although its price is against it."""

    byte_s: float | None
    call_s: float
    queue: Queue
    probe: bool

    def load_s(self, nbytes: float, calls: float) -> float:
        """Return the seconds to load so many bytes in so many calls; 0 while that is not known."""
        return 0.0 if self.byte_s is None else self.byte_s * nbytes + self.call_s * calls


class TierSpeed:
    """See the module. Not thread-safe."""

    def __init__(self, now: float) -> None:
        self.queued_bytes = 0
        self._price = LearnedPrice()
        self._traffic = Traffic(now)
        self._running: set[Load] = set()
        # Seconds that a load charges which runs since the begin, and when that was last right.
        self._charged = 0.0
        self._at = now
        self._probed_at = now

    def begin(self, nbytes: int, now: float) -> Load:
        """Begin a call that loads so many bytes; `end` ends it."""
        self._charge(now)
        load = Load(nbytes, self._charged, now)
        self._running.add(load)
        return load

    def end(self, load: Load, now: float, *, loaded: int) -> None:
        """End a call, which brought `loaded` bytes; nothing is learned from one that brought only a part."""
        self._charge(now)
        self._running.discard(load)
        if loaded == load.nbytes:
            self._price.add(max(self._charged - load.charged, 0.0), loaded, 1.0, began=load.began, now=now)

    def chosen(self, nbytes: int, now: float) -> None:
        """Count a request that loads so many bytes, which wait until they are `gone`."""
        self.queued_bytes += nbytes
        self._traffic.add(now)

    def gone(self, nbytes: int) -> None:
        """So many bytes wait no longer: loaded, or given up."""
        self.queued_bytes -= nbytes

    def prices(self) -> tuple[float, float] | None:
        """The seconds for a byte and for a call, None while that is not known."""
        return self._price.prices

    def offer(self, now: float) -> Offer:
        """Return what a load finds now."""
        prices = self._price.prices
        if prices is None:
            return Offer(None, 0.0, Queue(), False)
        # What is under way has taken a part of its time.
        self._charge(now)
        done_s = sum(min(self._charged - load.charged, load.nbytes * prices[0]) for load in self._running)
        queue = Queue(max(self.queued_bytes * prices[0] - done_s, 0.0), self._traffic.rate(now))
        return Offer(*prices, queue, now - max(self._price.last_at, self._probed_at) >= PROBE_S)

    def probed(self, now: float) -> None:
        """The next probe is due in `PROBE_S`."""
        self._probed_at = now

    def _charge(self, now: float) -> None:
        if self._running:
            self._charged += max(now - self._at, 0.0) / len(self._running)
        self._at = max(now, self._at)
