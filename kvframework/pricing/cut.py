"""Where a hit is cut: what lies before is loaded from a tier, what lies behind is computed. Pure.

For a cut behind m chunks, of a prompt of n tokens:

    T(m) = max(the longest load of a tier's part, the wait of the engine) + C(m, n)

and what the work costs other requests, at the tiers and at the engine. The cut with the least sum is taken, of equal
ones the longest.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import exp
from typing import NamedTuple

from kvframework.pricing.prefill import EngineSpeed, LearnedPrice

# What arrives: requests a second and their work, of the last minutes; and a queue, with what one more request costs the
# others. Pure, with the caller's clock.

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


# No more than this share of a tier's time is expected to go to loads that come later: those see this one, and many of
# them leave theirs.
MOST_BUSY = 0.3


class Turns:
    """`left_s` are the seconds of work that are left of each load under way, `rate` the loads a second that come
    behind, and `busy` the share of the time that loads have taken. A load that needs less than the others is over
    before them, so of each it waits for as much as it has itself."""

    __slots__ = ("_busy", "_left", "_rate", "_sums")

    def __init__(self, left_s: Iterable[float] = (), rate: float = 0.0, busy: float = 0.0) -> None:
        self._left = sorted(left_s)
        self._sums = [0.0, *accumulate(self._left)]
        self._rate = rate
        self._busy = min(busy, MOST_BUSY)

    def load_s(self, work_s: float) -> float:
        """Return how long a load of `work_s` takes, with the turns of the others, and of those that come meanwhile."""
        return (self._waited_s(work_s) + work_s) / (1.0 - self._busy)

    def cost_to_others(self, work_s: float) -> float:
        """Return the seconds that others wait longer, together, for a load of `work_s`: those under way, each as long
        as this one waits for it, and those that come before it is over, each by `work_s`."""
        wait_s = self._waited_s(work_s)
        return wait_s + work_s * self._rate * (wait_s + work_s)

    def _waited_s(self, work_s: float) -> float:
        """Return for how long it waits for those under way, in all its turns."""
        shorter = bisect(self._left, work_s)
        return self._sums[shorter] + (len(self._left) - shorter) * work_s


# Cuts that are priced at most: a microsecond or two each.
MOST_CUTS = 256


class TierPart(NamedTuple):
    """What one tier has of a hit: `load_s[i]` are the seconds in which it loads its part of the first `i` chunks that
    may be cut off; never less for more of them."""

    turns: Turns
    load_s: Sequence[float]

    def ready_s(self, count: int) -> float:
        """Return for how long the first `count` chunks wait for this tier."""
        return self.turns.load_s(self.load_s[count]) if self.load_s[count] else 0.0


class Cut(NamedTuple):
    """The first `chunks` of those that may be cut off are loaded. `load_s` and `compute_s` are the prices of the
    others, or, if there are none, of all: for how long the request waits for their load, and for how long it computes
    them. `saved_s` is what the cut spares, by these prices, the request and those behind it together."""

    chunks: int
    load_s: float = 0.0
    compute_s: float = 0.0
    saved_s: float = 0.0


def cut(
    parts: Sequence[TierPart], engine: EngineSpeed, queue: Queue, *, first: int, last: int, chunk_tokens: int
) -> Cut:
    """Return where to cut a hit of which the tokens before `first` need no load, and of a prompt of `last` tokens.

    All `parts` have the same length, the number of chunks that may be cut off and one more.
    """
    if not parts:
        return Cut(0)
    chunks = len(parts[0].load_s) - 1

    def price(count: int) -> float:
        compute_s = engine.prefill_s(first + count * chunk_tokens, last)
        ready_s, others_s = queue.wait_s, queue.cost_to_others(compute_s)
        for part in parts:
            ready_s = max(ready_s, part.ready_s(count))
            others_s += part.turns.cost_to_others(part.load_s[count])
        return ready_s + compute_s + others_s

    stride = -(-chunks // MOST_CUTS) or 1
    everything = least = price(chunks)
    best = chunks
    for count in range(chunks - stride, -1, -stride):
        costs = price(count)
        if costs < least:
            best, least = count, costs
    if chunks % stride and (costs := price(0)) < least:
        best, least = 0, costs
    begin = best if best < chunks else 0
    load_s = max(part.ready_s(chunks) - part.ready_s(begin) for part in parts)
    compute_s = engine.prefill_s(first + begin * chunk_tokens, first + chunks * chunk_tokens)
    return Cut(best, load_s, compute_s, everything - least)


# The speed of one tier: bytes a second, learned from finished loads, and the bytes that wait to be loaded. Pure, with
# the caller's clock and lock.
#
# Loads that run at once share a tier. Each is charged the time in which it had the tier to itself, so to say: of a
# second in which two run, half a second. The sum of the charges is the time in which the tier was busy at all, so bytes
# by charges are what the tier as a whole brings a second, whatever runs at once.

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
