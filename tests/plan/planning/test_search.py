"""The search finds the cheapest setting, without all simulations."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvf_plan.planning.goal import Figures, Goal, Setting, cheapest
from kvf_plan.planning.offers import ASSUMED_PRICES, GIB, Prices, TierOffer
from kvf_plan.planning.search import Combination, Steps, capacities, first_enough, search

_PRICES = Prices(ASSUMED_PRICES, assumed=True)
_SIZES = [GIB << power for power in range(8)]
_TIERS = (None, TierOffer("disk", 3e9))


def combination(eviction: str, tier: TierOffer | None, start: int) -> Combination:
    l2_bytes, policy = (0, None) if tier is None else (100 * GIB, "write_through")
    return Combination(512, eviction, tier, l2_bytes, policy, start)  # type: ignore[arg-type]


class Simulated:
    """Times that fall with each doubling of L1, `offset` for each combination; counts the calls."""

    def __init__(self, offsets: dict[tuple[str, bool], float]) -> None:
        self._offsets = offsets
        self.calls: list[Setting] = []

    def __call__(self, setting: Setting) -> Figures:
        self.calls.append(setting)
        ttft = self._offsets[setting.eviction, setting.tier is not None] / (setting.l1_bytes / GIB)
        name = "" if setting.tier is None else setting.tier.name
        cost = _PRICES.cost(setting.l1_bytes, name, setting.l2_bytes)
        times = dict.fromkeys(("mean", "p50", "p90", "p99"), ttft)
        return Figures(ttft_s=times, l1_hit=0.0, l2_hit=0.0, engine_s=1.0, cost=cost)


OFFSETS = st.fixed_dictionaries(
    {(eviction, tiered): st.floats(0.5, 200.0) for eviction in ("lru", "two_queues") for tiered in (False, True)}
)


def best_of_all(offsets: dict[tuple[str, bool], float], goal: Goal) -> float | None:
    costs = []
    for (eviction, tiered), offset in offsets.items():
        tier = _TIERS[tiered]
        for size in _SIZES:
            if offset / (size / GIB) <= (goal.ttft_s or 0):
                setting = combination(eviction, tier, 0).at(size)
                costs.append(_PRICES.cost(size, "" if tier is None else tier.name, setting.l2_bytes))
    return min(costs, default=None)


@given(offsets=OFFSETS, start=st.integers(0, 7))
def test_it_finds_the_cheapest(offsets: dict[tuple[str, bool], float], start: int) -> None:
    goal = Goal(1.0)
    combinations = [combination(eviction, tier, start) for tier in _TIERS for eviction in ("lru", "two_queues")]
    whole = Simulated(offsets)
    found = cheapest(list(search(combinations, _SIZES, goal, _PRICES, whole)), goal)
    best = best_of_all(offsets, goal)
    if found is None:
        assert best is None
    else:
        assert found.figures.cost == best
    assert len(whole.calls) == len(set(map(repr, whole.calls))) < len(combinations) * len(_SIZES)


def test_without_a_goal_it_spreads() -> None:
    whole = Simulated({("lru", False): 3.0})
    list(search([combination("lru", None, 3)], _SIZES, Goal(), _PRICES, whole))
    assert [setting.l1_bytes for setting in whole.calls] == [_SIZES[0], _SIZES[2], _SIZES[5]]


@given(st.integers(1, 60), st.integers(0, 60), st.integers(-3, 70))
def test_steps_find_the_first_that_is_enough(count: int, first: int, start: int) -> None:
    steps, tried = Steps(start, count), []
    while (index := steps.next()) is not None:
        assert 0 <= index < count
        tried.append(index)
        steps.tell(index, is_enough=index >= first)
    assert steps.enough == (first if first < count else None)
    assert len(tried) == len(set(tried)) <= 12


@given(st.integers(0, 1 << 45), st.integers(0, 1 << 45))
def test_capacities_are_what_one_would_buy(least: int, most: int) -> None:
    sizes = capacities(least, most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= least
    assert sizes[-1] >= most
    assert len(sizes) == 1 or sizes[-2] < most
    assert all(size & (size - 1) == 0 or size % 3 == 0 for size in sizes)
    assert all(after / before <= 1.5 for before, after in pairwise(sizes))


def test_the_first_size_that_is_enough() -> None:
    assert first_enough(_SIZES, lambda size: size >= 3 * GIB) == 2
    assert first_enough(_SIZES, lambda _: False) == len(_SIZES) - 1
