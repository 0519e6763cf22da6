"""Which settings to simulate: of each combination of policies and tier the least L1 that meets the goal. Pure.

The estimate says where to begin, and simulations decide. More L1 never costs less, and never takes longer but for
chance, so the least that meets the goal is the cheapest of its combination.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from kvf_plan.planning.goal import Figures, Goal, Row, Setting, shortfalls
from kvf_plan.planning.offers import Prices, TierOffer
from kvframework.config.schema import WritePolicyName

_MIB = 1 << 20
# Without a goal: these of the sizes, in parts of three.
_SPREAD = (0, 1, 2)


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

    def cost(self, prices: Prices, l1_bytes: int) -> float:
        return prices.cost(l1_bytes, self.tier.name if self.tier is not None else "", self.l2_bytes)


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


def search(
    combinations: Iterable[Combination],
    sizes: Sequence[int],
    goal: Goal,
    prices: Prices,
    simulated: Callable[[Setting], Figures],
) -> Iterator[Row]:
    """Yield each row as it is simulated, for some of the `sizes`, which ascend."""
    if goal.ttft_s is None:
        count = len(sizes)
        indices = range(count) if count <= len(_SPREAD) else [count * part // len(_SPREAD) for part in _SPREAD]
        settings = [combination.at(sizes[index]) for combination in combinations for index in indices]
        yield from (Row(setting, simulated(setting)) for setting in settings)
        return
    near: dict[TierOffer | None, int] = {}
    best = math.inf
    for combination in combinations:
        # Only what costs less than the best so far, the least at any cost; another policy on the same tier needs about
        # as much.
        costs = [combination.cost(prices, size) for size in sizes]
        steps = Steps(near.get(combination.tier, combination.start), max(bisect_left(costs, best), 1))
        while (index := steps.next()) is not None:
            setting = combination.at(sizes[index])
            row = Row(setting, simulated(setting))
            yield row
            broken = shortfalls(row, goal)
            saturated = row.figures.saturated
            steps.tell(index, is_enough=not saturated and all(each.limit != "ttft" for each in broken))
            if not broken and not saturated:
                best = min(best, row.figures.cost)
        if steps.enough is not None:
            near[combination.tier] = steps.enough


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
