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
from typing import NamedTuple

from kvframework.pricing.prefill import EngineSpeed
from kvframework.pricing.traffic import Queue

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
