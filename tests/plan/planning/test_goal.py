"""The row that is taken: no limit broken and none cheaper, or what comes closest."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvf_plan.planning.goal import Figures, Goal, Row, Setting, cheapest, closest, shortfalls

_SETTING = Setting(512, 1 << 30, "lru")
_NUMBERS = st.floats(0.1, 100.0)


def row(ttft_s: float, cost: float, drive_writes: float = 0.0, written: float = 0.0) -> Row:
    times = dict.fromkeys(("mean", "p50", "p90", "p99"), ttft_s)
    figures = Figures(
        ttft_s=times, l1_hit=0.0, l2_hit=0.0, engine_s=1.0, cost=cost, drive_writes=drive_writes, written_per_s=written
    )
    return Row(_SETTING, figures)


ROWS = st.lists(st.builds(row, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS), min_size=1, max_size=12)
GOALS = st.builds(Goal, st.none() | _NUMBERS, st.just("mean"), st.none() | _NUMBERS, st.none() | _NUMBERS)


@given(ROWS, GOALS)
def test_the_chosen_row_meets_the_goal_and_none_that_does_is_cheaper(rows: list[Row], goal: Goal) -> None:
    good = [
        each
        for each in rows
        if (goal.ttft_s is None or each.figures.ttft_s["mean"] <= goal.ttft_s)
        and (goal.budget is None or each.figures.cost <= goal.budget)
        and (goal.drive_writes is None or each.figures.drive_writes <= goal.drive_writes)
    ]
    chosen = cheapest(rows, goal)
    if chosen is None:
        assert not good
    else:
        assert chosen in good
        assert chosen.figures.cost == min(each.figures.cost for each in good)


@given(ROWS, GOALS)
def test_what_comes_closest_has_the_least_of_the_worst_shortfalls(rows: list[Row], goal: Goal) -> None:
    def worst(each: Row) -> float:
        return max((short.over for short in shortfalls(each, goal)), default=0.0)

    assert worst(closest(rows, goal)) == min(map(worst, rows))


def test_of_equal_cost_the_one_that_answers_sooner() -> None:
    rows = [row(2.0, 5.0), row(1.0, 5.0, written=2.0), row(1.0, 5.0, written=1.0), row(0.5, 6.0)]
    assert cheapest(rows, Goal(3.0)) == rows[2]


def test_a_saturated_tier_is_not_taken() -> None:
    saturated, dear, slow = row(1.0, 1.0), row(1.0, 5.0), row(9.0, 1.0)
    saturated = Row(_SETTING, msgspec.structs.replace(saturated.figures, saturated=True))
    assert cheapest([saturated, dear], Goal(3.0)) == dear
    assert cheapest([saturated, slow], Goal(3.0)) is None
    assert closest([saturated, slow], Goal(3.0)) == slow


def test_a_shortfall_says_by_how_much() -> None:
    (short,) = shortfalls(row(1.8, 1.0), Goal(1.5))
    assert (short.limit, short.has, short.wanted) == ("ttft", 1.8, 1.5)
    assert math.isclose(short.over, 0.2)
    assert [each.limit for each in shortfalls(row(9.0, 9.0, 9.0), Goal(1.0, "p99", 2.0, 3.0))] == [
        "ttft",
        "budget",
        "drive_writes",
    ]


def test_what_is_no_number_meets_nothing() -> None:
    assert cheapest([row(math.nan, 1.0)], Goal(1.0)) is None
