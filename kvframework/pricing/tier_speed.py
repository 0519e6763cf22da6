"""The speed of one tier: bytes a second, learned from finished loads, and the bytes that wait to be loaded. Pure, with
the caller's clock and lock.

Loads that run at once share a tier. Each is charged the time in which it had the tier to itself, so to say: of a second
in which two run, half a second. The sum of the charges is the time in which the tier was busy at all, so bytes by
charges are what the tier as a whole brings a second, whatever runs at once.
"""

from __future__ import annotations

from typing import NamedTuple

from kvframework.pricing.cut import Turns
from kvframework.pricing.rates import LearnedPrice
from kvframework.pricing.traffic import Traffic

# A tier from which nothing was loaded for so long gets a load that its price is against, so that one that is quick
# again is used again.
PROBE_S = 15.0


class Load:
    """A request's load from the tier: the bytes that wait for it, or are under way."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Call:
    """A call that loads: its bytes, and when it began, by the tier's clock of charges and by the caller's."""

    __slots__ = ("began", "charged", "load", "nbytes")

    def __init__(self, load: Load | None, nbytes: int, charged: float, began: float) -> None:
        self.load = load
        self.nbytes = nbytes
        self.charged = charged
        self.began = began


class Offer(NamedTuple):
    """What a tier offers now: the seconds for a byte and for a call, None while they are not known; the loads
    that take turns; and whether a load is due although its price is against it."""

    byte_s: float | None
    call_s: float
    turns: Turns
    probe: bool

    def load_s(self, nbytes: float, calls: float) -> float:
        """Return the seconds to load so many bytes in so many calls; 0 while that is not known."""
        return 0.0 if self.byte_s is None else self.byte_s * nbytes + self.call_s * calls


class TierSpeed:
    """See the module. Not thread-safe."""

    def __init__(self, now: float) -> None:
        self._loads: set[Load] = set()
        self._price = LearnedPrice()
        self._traffic = Traffic(now)
        self._running: set[Call] = set()
        # Seconds that a load charges which runs since the begin, and when that was last right.
        self._charged = 0.0
        self._at = now
        self._probed_at = now

    def begin(self, nbytes: int, now: float, load: Load | None = None) -> Call:
        """Begin a call that loads so many bytes, of a `load`; `end` ends it."""
        self._charge(now)
        call = Call(load, nbytes, self._charged, now)
        self._running.add(call)
        return call

    def end(self, call: Call, now: float, *, loaded: int) -> None:
        """End a call, which brought `loaded` bytes; nothing is learned from one that brought only a part."""
        self._charge(now)
        self._running.discard(call)
        if loaded == call.nbytes:
            self._price.add(max(self._charged - call.charged, 0.0), loaded, 1.0, began=call.began, now=now)

    def chosen(self, nbytes: int, now: float) -> Load:
        """Count a request that loads so many bytes, which wait until they are `gone`."""
        load = Load(nbytes)
        self._loads.add(load)
        self._traffic.add(now, work=nbytes)
        return load

    def gone(self, load: Load, nbytes: int) -> None:
        """So many bytes of a load wait no longer: they came, or were given up."""
        load.nbytes -= nbytes
        if load.nbytes <= 0:
            self._loads.discard(load)

    @property
    def queued_bytes(self) -> int:
        """The bytes of all loads."""
        return sum(load.nbytes for load in self._loads)

    def prices(self) -> tuple[float, float] | None:
        """The seconds for a byte and for a call, None while that is not known."""
        return self._price.prices

    def offer(self, now: float) -> Offer:
        """Return what a load finds now."""
        prices = self._price.prices
        if prices is None:
            return Offer(None, 0.0, Turns(), False)
        # What is under way has taken a part of its time.
        self._charge(now)
        left_s = {load: load.nbytes * prices[0] for load in self._loads}
        for call in self._running:
            if call.load in left_s:
                left_s[call.load] -= min(self._charged - call.charged, call.nbytes * prices[0])
        busy = self._traffic.work(now) * prices[0]
        turns = Turns((max(seconds, 0.0) for seconds in left_s.values()), self._traffic.rate(now), busy)
        return Offer(*prices, turns, now - max(self._price.last_at, self._probed_at) >= PROBE_S)

    def probed(self, now: float) -> None:
        """The next probe is due in `PROBE_S`."""
        self._probed_at = now

    def _charge(self, now: float) -> None:
        if self._running:
            self._charged += max(now - self._at, 0.0) / len(self._running)
        self._at = max(now, self._at)
