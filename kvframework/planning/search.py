"""Which settings to simulate: of each combination of policies and tier the least L1 that meets the goal. Pure.

The estimate says where to begin. More L1 never costs less, and as good as never takes longer, so the least that meets
the goal is the cheapest of its combination.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvframework.config.schema import WritePolicyName
from kvframework.planning.goal import Figures, Goal, Row, shortfalls
from kvframework.planning.offers import TierOffer
from kvframework.planning.setting import Setting

_MIB = 1 << 20


class Combination(msgspec.Struct, frozen=True):
    """All of a setting but L1's size. `start` is the index of the capacity at which the search begins."""

    chunk_tokens: int
    eviction: str
    tier: TierOffer | None
    l2_bytes: int
    write_policy: WritePolicyName | None
    start: int

    def at(self, l1_bytes: int) -> Setting:
        return Setting(self.chunk_tokens, l1_bytes, self.eviction, self.tier, self.l2_bytes, self.write_policy)


def capacities(least: int, most: int) -> list[int]:
    """Return sizes of L1 that one would buy, 2^n or 3 x 2^n MiB, from the first that is no less than `least` to the
    first that is no less than `most`."""
    sizes: list[int] = []
    power = _MIB
    while not sizes or sizes[-1] < max(most, least):
        for size in (power, power // 2 * 3):
            if size >= least and (not sizes or sizes[-1] < most):
                sizes.append(size)
        power *= 2
    return sizes


def search(
    combinations: Sequence[Combination],
    sizes: Sequence[int],
    goal: Goal,
    simulated: Callable[[Setting], Figures],
) -> Iterator[Row]:
    """Yield each row as it is found. `sizes` ascend. Calls `simulated` once a row, which may take seconds.

    Without a goal for the time each combination is simulated at its start alone.
    """
    found: dict[TierOffer | None, int] = {}
    for combination in combinations:
        # Another policy on the same tier needs about as much.
        steps = _Steps(found.get(combination.tier, combination.start), len(sizes))
        while (index := steps.next()) is not None:
            setting = combination.at(sizes[index])
            row = Row(setting, simulated(setting))
            yield row
            if goal.ttft_s is None:
                break
            steps.tell(index, is_enough="ttft" not in {each.limit for each in shortfalls(row, goal)})
        if steps.enough is not None:
            found[combination.tier] = steps.enough


class _Steps:
    """A search for the first of `count` indices that is enough: from the start in steps that double, then by halves."""

    def __init__(self, start: int, count: int) -> None:
        self._start = min(max(start, 0), count - 1)
        self._count = count
        self._too_little = -1
        self._step = 1
        self.enough: int | None = None

    def next(self) -> int | None:
        """Return the index to try, None if the first that is enough is known, or that there is none."""
        enough = self._count if self.enough is None else self.enough
        if enough - self._too_little <= 1:
            return None
        if self.enough is None and self._too_little < 0:
            return self._start
        if self.enough is None:
            index = min(self._too_little + self._step, self._count - 1)
        elif self._too_little < 0:
            index = max(enough - self._step, 0)
        else:
            return (enough + self._too_little) // 2
        self._step *= 2
        return index

    def tell(self, index: int, *, is_enough: bool) -> None:
        if is_enough:
            self.enough = index
        else:
            self._too_little = index


def first_enough(sizes: Sequence[int], is_enough: Callable[[int], bool]) -> int:
    """Return the index of the first size that is enough, the last if none is. More is never worse."""
    return min(bisect_left(sizes, True, key=is_enough), len(sizes) - 1)
