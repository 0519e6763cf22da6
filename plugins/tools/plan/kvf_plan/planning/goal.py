"""Which row of a plan to take: the cheapest that meets the goal, or what comes closest. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvf_plan.planning.setting import Setting
from kvframework.errors import PlanError

At = Literal["mean", "p50", "p90", "p99"]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a setting was found to do. `ttft_s` has the key of each `At`; rates are bytes a second of the trace's time.

    `l1_hit` and `l2_hit` are shares of all prompts' tokens; `l2_used` bytes. `busy` is the share of the time in which
    the tier reads or writes, `dropped` the share of the writes that it had no time for. `drive_writes` is how often a
    day the tier's whole size is written, 0 without one. `cost` is in the unit of the prices.
    """

    ttft_s: dict[str, float]
    l1_hit: float
    l2_hit: float
    engine_s: float
    written_per_s: float = 0.0
    read_per_s: float = 0.0
    busy: float = 0.0
    dropped: float = 0.0
    l2_used: int = 0
    drive_writes: float = 0.0
    cost: float = 0.0

    @property
    def hit(self) -> float:
        return self.l1_hit + self.l2_hit


class Row(msgspec.Struct, frozen=True):
    """`sampled`: the figures are of a part of the sessions."""

    setting: Setting
    figures: Figures
    sampled: bool = False


class Goal(msgspec.Struct, frozen=True):
    """Limits, None for none: the time to the first token, the cost, and how often a day a tier may be written."""

    ttft_s: float | None = None
    at: At = "mean"
    budget: float | None = None
    drive_writes: float | None = None


def goal_of(ttft_s: float | None, at: At, budget: float | None, drive_writes: float | None) -> Goal:
    """Return a goal. Raises `PlanError` for a limit that is no positive number."""
    for where, limit in (("--ttft", ttft_s), ("--drive-writes", drive_writes)):
        if limit is not None and not 0 < limit < math.inf:
            raise PlanError(f"{limit} is no limit", where=where, available="a positive number")
    return Goal(ttft_s, at, budget, drive_writes)


class Shortfall(msgspec.Struct, frozen=True):
    """A limit that a row breaks: it `has` more than is `wanted`."""

    limit: Literal["ttft", "budget", "drive_writes"]
    has: float
    wanted: float

    @property
    def over(self) -> float:
        """By which share of the limit."""
        return self.has / self.wanted - 1 if self.wanted else float("inf")


def shortfalls(row: Row, goal: Goal) -> list[Shortfall]:
    """Return the limits that a row breaks."""
    figures = row.figures
    limits: list[tuple[Literal["ttft", "budget", "drive_writes"], float, float | None]] = [
        ("ttft", figures.ttft_s[goal.at], goal.ttft_s),
        ("budget", figures.cost, goal.budget),
        ("drive_writes", figures.drive_writes, goal.drive_writes),
    ]
    return [Shortfall(limit, has, wanted) for limit, has, wanted in limits if wanted is not None and not has <= wanted]


def cheapest(rows: Sequence[Row], goal: Goal) -> Row | None:
    """Return the cheapest row that breaks no limit, None if all do. Of equal cost, the one that answers sooner; then
    the one that writes less."""
    good = [row for row in rows if not shortfalls(row, goal)]
    return min(
        good, key=lambda row: (row.figures.cost, row.figures.ttft_s[goal.at], row.figures.written_per_s), default=None
    )


def closest(rows: Sequence[Row], goal: Goal) -> Row:
    """Return the row whose worst shortfall is least, of equal ones the cheapest. `rows` are not empty."""
    return min(
        rows,
        key=lambda row: (max((each.over for each in shortfalls(row, goal)), default=0.0), row.figures.cost),
    )
