"""A setting of a server with its configuration as TOML, and which row of a plan to take: the cheapest that meets the
goal, or what comes closest. Pure.

What is simulated is the very file that is written: both come from the same text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvf_plan.errors import PlanError
from kvf_plan.planning.offers import TierOffer
from kvframework.api.plugin import ByteSize
from kvframework.api.toml import parse_toml, toml_value
from kvframework.config.load import assemble, layers_of
from kvframework.config.schema import Config, WritePolicyName

# A tier that works more than this share of the time, or has no time for more than that of what is written through, is
# saturated: any more load finds less. What write_back loses has left L1 before its write, however idle the tier is.
MOST_BUSY, MOST_DROPPED = 0.95, 0.05
# The watermarks that write_back needs: L1 evicts before it is full.
_HIGH, _LOW = 0.95, 0.9
_PRICED = "# Tokens that an engine computes sooner than the tier loads them are computed, so no tier slows a request."
_WHY = {
    "write_through": "The tier stores every computed chunk: the most hits, and the most writes",
    "write_through_selective": "The tier stores chunks at their second use: the fewest writes, fewer hits",
    "write_back": "The tier stores chunks that L1 evicts: L1 and the tier hold different chunks",
}
At = Literal["mean", "p50", "p90", "p99"]


class Setting(msgspec.Struct, frozen=True):
    """`tier` None: no L2, and then `l2_bytes` is 0 and `write_policy` None."""

    chunk_tokens: int
    l1_bytes: int
    eviction: str
    tier: TierOffer | None = None
    l2_bytes: int = 0
    write_policy: WritePolicyName | None = None


def toml_of(setting: Setting, about: Sequence[str] = ()) -> str:
    """Return the configuration, with `about` as comments at its head."""
    lines = [f"# {line}".rstrip() for line in about]
    lines += [
        "",
        "[server]",
        "# Tokens of an object, as in the plan: a larger chunk finds less, a smaller one costs more calls.",
        f"chunk_size = {setting.chunk_tokens}",
        *([] if setting.tier is None else [_PRICED, "price = true"]),
        "",
        "[l1]",
        'use = "pinned"',
        "# Resident from the start, beside 80 MB for the server.",
        f"capacity = {toml_value(ByteSize(setting.l1_bytes))}",
    ]
    if setting.write_policy == "write_back":
        lines += ["# L1 evicts before it is full, so that the tier has time to write.", f"high_watermark = {_HIGH}"]
        lines += [f"low_watermark = {_LOW}"]
    lines += ["", "[l1.eviction]", f"use = {toml_value(setting.eviction)}"]
    if setting.tier is not None and setting.write_policy is not None:
        lines += ["", "[[l2]]", *_tier(setting.tier, setting.l2_bytes, setting.write_policy)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _tier(tier: TierOffer, nbytes: int, write_policy: WritePolicyName) -> list[str]:
    kind = tier.kind
    lines = [f"use = {toml_value(kind.plugin)}", "# Replace the next value with yours."]
    lines += [f"{key} = {toml_value(value)}" for key, value in kind.options.items()]
    if kind.has_capacity:
        lines += [f"capacity = {toml_value(ByteSize(nbytes))}"]
    else:
        lines += [f"# The TOML sets no size: give the store at least {ByteSize(nbytes)}."]
    return [*lines, f"# {_WHY[write_policy]}.", f"write_policy = {toml_value(write_policy)}"]


def config_of(setting: Setting) -> Config:
    """Return the configuration as a server reads it."""
    return assemble(layers_of(parse_toml(toml_of(setting), where="the plan")))


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a setting was found to do. `ttft_s` has the key of each `At`; rates are bytes a second of the trace's time.

    `l1_hit` and `l2_hit` are shares of all prompts' tokens; `l2_used` bytes. `busy` is the share of the time in which
    the tier reads or writes, `dropped` the share of the writes that it had no time for. `drive_writes` is how often a
    day the tier's whole size is written, 0 without one. `cost` is in the unit of the prices. A setting with
    a `saturated` tier is not taken.
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
    saturated: bool = False


class Row(msgspec.Struct, frozen=True):
    setting: Setting
    figures: Figures


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
            raise PlanError(f"{limit} is not a limit", where=where, available="a positive number")
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
    """Return the cheapest row that breaks no limit and saturates no tier, None if there is none. Of equal cost, the one
    that answers sooner; then the one that writes less."""
    good = [row for row in rows if not row.figures.saturated and not shortfalls(row, goal)]
    return min(
        good, key=lambda row: (row.figures.cost, row.figures.ttft_s[goal.at], row.figures.written_per_s), default=None
    )


def closest(rows: Sequence[Row], goal: Goal) -> Row:
    """Return the row whose worst shortfall is least, of equal ones the cheapest; a row with a saturated tier only if
    all are. `rows` are not empty."""

    def rank(row: Row) -> tuple[bool, float, float]:
        worst = max((each.over for each in shortfalls(row, goal)), default=0.0)
        return row.figures.saturated, worst, row.figures.cost

    return min(rows, key=rank)
