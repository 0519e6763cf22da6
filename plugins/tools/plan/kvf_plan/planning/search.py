"""Which settings to simulate: of each combination of policies and tier the least L1 that meets the goal. Pure.

The estimate says where to begin, simulations of a sample of the sessions what it is about, and whole ones decide. More
L1 never costs less, and never takes longer but for chance, so the least that meets the goal is the cheapest of its
combination.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvf_plan.planning.goal import Figures, Goal, Row, Setting, cheapest, closest, shortfalls
from kvf_plan.planning.offers import Prices, TierOffer
from kvframework.config.schema import WritePolicyName

_MIB = 1 << 20
# Without a goal: these of the sizes, in parts of three.
_SPREAD = (0, 1, 2)
# A sample's times are no further off: those of conversations are 3 to 10 % too long.
_SAMPLES_ERROR = 0.15


class Combination(msgspec.Struct, frozen=True):
    """All of a setting but L1's size. `start` is the index of the size at which the search begins."""

    chunk_tokens: int
    eviction: str
    tier: TierOffer | None
    l2_bytes: int
    write_policy: WritePolicyName | None
    start: int

    def at(self, l1_bytes: int) -> Setting:
        return Setting(self.chunk_tokens, l1_bytes, self.eviction, self.tier, self.l2_bytes, self.write_policy)


def capacities(least: int, most: int) -> list[int]:
    """Return sizes that one would buy, 2^n or 3 x 2^n MiB, from the first that is no less than `least` to the first
    that is no less than `most`."""
    sizes: list[int] = []
    power = _MIB
    while not sizes or sizes[-1] < max(most, least):
        for size in (power, power // 2 * 3):
            if size >= least and (not sizes or sizes[-1] < most):
                sizes.append(size)
        power *= 2
    return sizes


def first_enough(sizes: Sequence[int], is_enough: Callable[[int], bool]) -> int:
    """Return the index of the first size that is enough, the last if none is. More is never worse."""
    return min(bisect_left(sizes, True, key=is_enough), len(sizes) - 1)


class _Start(NamedTuple):
    """Where all sessions are begun with: the index that was `enough` for a part of them, if there is one, and the
    `least` that can be, by the error of a sample."""

    combination: Combination
    enough: int
    least: int


class Search:
    """The search among `sizes`, which ascend. `whole` and `of_sample` simulate a setting; without the latter there is
    no sample, and with `quick` nothing else. `long`: also without a tier all sessions take too much time to try."""

    def __init__(
        self,
        combinations: Sequence[Combination],
        sizes: Sequence[int],
        goal: Goal,
        prices: Prices,
        whole: Callable[[Setting], Figures],
        of_sample: Callable[[Setting], Figures] | None,
        *,
        quick: bool = False,
        long: bool = False,
    ) -> None:
        self._combinations = combinations
        self._sizes = sizes
        self._goal = goal
        self._prices = prices
        self._whole = whole
        self._of_sample = of_sample
        self._quick = quick
        self._long = long
        self._known: dict[Setting, Figures] = {}

    def rows(self) -> Iterator[Row]:
        """Yield each row as it is found."""
        sampled = self._of_sample is not None
        if self._goal.ttft_s is None:
            yield from self._spread()
            return
        rows: list[Row] = []
        starts: list[_Start] = []
        near: dict[TierOffer | None, int] = {}
        best = math.inf
        for combination in self._combinations:
            # Another policy on the same tier needs about as much.
            steps = self._steps(combination, near.get(combination.tier, combination.start), best)
            missed = 0
            for row in self._climb(combination, steps, sampled=sampled):
                rows.append(row)
                if not self._fast_enough(row, _SAMPLES_ERROR):
                    missed = max(missed, self._sizes.index(row.setting.l1_bytes) + 1)
                yield row
                if not shortfalls(row, self._goal):
                    best = min(best, row.figures.cost)
            enough = steps.too_little + 1 if steps.enough is None else steps.enough
            starts.append(_Start(combination, enough, missed))
            if steps.enough is not None:
                near[combination.tier] = steps.enough
        if sampled and not self._quick:
            yield from self._decided(rows, starts)

    def _spread(self) -> Iterator[Row]:
        count = len(self._sizes)
        indices = range(count) if count <= len(_SPREAD) else [count * part // len(_SPREAD) for part in _SPREAD]
        for combination in self._combinations:
            for index in indices:
                yield self._row(combination.at(self._sizes[index]), sampled=True)

    def _steps(self, combination: Combination, start: int, best: float) -> Steps:
        """Return the steps among the sizes that cost less than `best`, the least at any cost."""
        cheaper = bisect_left(self._sizes, True, key=lambda size: self._cost_of(combination, size) >= best)
        return Steps(start, max(cheaper, 1))

    def _climb(self, combination: Combination, steps: Steps, *, sampled: bool) -> Iterator[Row]:
        while (index := steps.next()) is not None:
            row = self._row(combination.at(self._sizes[index]), sampled=sampled)
            steps.tell(index, is_enough=self._fast_enough(row))
            yield row

    def _row(self, setting: Setting, *, sampled: bool) -> Row:
        """Simulate: all sessions also where there is no tier, since that takes little time; each setting once."""
        if sampled and self._of_sample is not None and (self._long or setting.tier is not None):
            return Row(setting, self._of_sample(setting), sampled=True)
        if setting not in self._known:
            self._known[setting] = self._whole(setting)
        return Row(setting, self._known[setting])

    def _fast_enough(self, row: Row, error: float = 0.0) -> bool:
        return all(each.limit != "ttft" or each.over <= error for each in shortfalls(row, self._goal))

    def _decided(self, rows: Sequence[Row], starts: Sequence[_Start]) -> Iterator[Row]:
        """Simulate all sessions where a part of them has found the cheapest settings, or what comes closest."""
        best = math.inf
        whole: list[Row] = []
        for start in sorted(starts, key=lambda start: self._cost(start.combination, start.enough)):
            if self._cost(start.combination, start.least) >= best:
                continue
            steps = self._steps(start.combination, start.enough, best)
            steps.too_little = start.least - 1
            for row in self._climb(start.combination, steps, sampled=False):
                whole.append(row)
                yield row
            if (found := cheapest(whole, self._goal)) is not None:
                best = found.figures.cost
        if best == math.inf:
            yield self._row(closest(rows, self._goal).setting, sampled=False)

    def _cost(self, combination: Combination, index: int) -> float:
        return self._cost_of(combination, self._sizes[min(max(index, 0), len(self._sizes) - 1)])

    def _cost_of(self, combination: Combination, l1_bytes: int) -> float:
        tier = combination.tier.name if combination.tier is not None else ""
        return self._prices.cost(l1_bytes, tier, combination.l2_bytes)


class Steps:
    """A search for the first of `count` indices that is enough: from the start in steps that double, then by halves.
    `enough` is the least that is known to be, `too_little` the most that is known not to."""

    def __init__(self, start: int, count: int) -> None:
        self._start = min(max(start, 0), count - 1)
        self._count = count
        self.too_little = -1
        self._step = 1
        self._begun = False
        self.enough: int | None = None

    def next(self) -> int | None:
        """Return the index to try, None if the first that is enough is known, or that there is none."""
        enough = self._count if self.enough is None else self.enough
        if enough - self.too_little <= 1:
            return None
        if not self._begun:
            self._begun = True
            return max(self._start, self.too_little + 1)
        if self.enough is not None and self.too_little >= 0:
            return (enough + self.too_little) // 2
        step, self._step = self._step, self._step * 2
        if self.enough is None:
            return min(self.too_little + step, self._count - 1)
        return max(enough - step, 0)

    def tell(self, index: int, *, is_enough: bool) -> None:
        if is_enough:
            self.enough = index
        else:
            self.too_little = index
