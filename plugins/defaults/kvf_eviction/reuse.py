"""How soon objects of a queue are used again, and what it is worth to keep one of a certain age. Pure.

Time is counted in objects that came into L1. An object begins to wait at each use by another request; the wait ends
with the next one, in L1 or after it left, as long as its ghost is remembered. From the waits that ended at an age, as a
share of those that are old enough to have ended there, follows for each age how many hits an object of that age
promises for the time that it takes up a place, if it is kept for as long as pays best.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

# Ages up to 2^30 objects: 0, 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, and so on.
BINS = 60
_EDGES = [0, 1, *(((2 + half) << bits) // 2 for bits in range(1, 31) for half in (0, 1))][: BINS + 1]
_WIDTHS = [end - first for first, end in pairwise(_EDGES)]
_MIDDLES = [(first + end) / 2 for first, end in pairwise(_EDGES)]
# Times between two calls of `learn` of which the number of waits that began is known.
_TIMES = 64
# Never quite none is left, so that a wrong sum cannot make an age infinitely dear.
_LEFT = 0.01


def age_bin(age: int) -> int:
    """Return the bin of an age."""
    bits = age.bit_length()
    return age if bits < 2 else min(2 * bits - 2 + (age >> (bits - 2) & 1), BINS - 1)


class Reuse:
    """The waits of one queue. `worth` has hits for each object and time, by the bin of its age."""

    def __init__(self) -> None:
        self.worth = [0.0] * BINS
        # Waits that began since the last `learn`, and that ended, by age.
        self.began = 0
        self.ended = [0.0] * BINS
        # Of each earlier time between two calls of `learn`, the latest last: its end, and the waits that began.
        self._times: list[tuple[int, float]] = []
        self._earlier = 0.0

    def learn(self, now: int, least: float) -> None:
        """Compute `worth` from what was counted so far; an age that fewer than `least` waits can have reached promises
        nothing."""
        self._times.append((now, self.began))
        self.began = 0
        if len(self._times) > _TIMES:
            self._earlier += self._times.pop(0)[1]
        shares = self._shares(now, least)
        # The best average from each age on: the upper hull of hits over time, built from the oldest age.
        left = list(accumulate(shares, lambda rest, share: max(rest - share, _LEFT), initial=1.0))
        hull: list[tuple[float, float]] = []
        for index in range(BINS - 1, -1, -1):
            hits = shares[index]
            time = max(left[index] - hits / 2, _LEFT) * _WIDTHS[index]
            while hull and hull[-1][0] * time > hits * hull[-1][1]:
                more = hull.pop()
                hits, time = hits + more[0], time + more[1]
            hull.append((hits, time))
            self.worth[index] = hits / time

    def forget_half(self) -> None:
        """Let what was counted so far weigh half as much."""
        self.ended = [count / 2 for count in self.ended]
        self._times = [(at, count / 2) for at, count in self._times]
        self._earlier /= 2

    def _shares(self, now: int, least: float) -> list[float]:
        """Return by age how many of all waits end there."""
        shares = [0.0] * BINS
        reached, times = self._earlier, 0
        for index in range(BINS - 1, -1, -1):
            while times < len(self._times) and now - self._times[times][0] >= _MIDDLES[index]:
                reached += self._times[times][1]
                times += 1
            if reached >= least and reached:
                shares[index] = min(self.ended[index] / reached, 1.0)
        return shares
