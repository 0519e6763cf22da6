"""The figures of `kvframework bench policy` and their tables."""

from __future__ import annotations

import msgspec
from rich.table import Table

from kvframework_bench.console import format_range, new_table
from kvframework_bench.rounds import Spread

# Microseconds a block, by policy.
TARGETS = {"lru": 4.0, "s3fifo": 8.0, "two_queues": 8.0}


class PolicyRow(msgspec.Struct, frozen=True):
    """`us`: processor time a block of a request, in an L1 of `objects` objects, all of it full; `hit_rate` is the share
    of blocks that the LOOKUPs of the same requests found, as prefixes. `target_us` is 0 for none."""

    policy: str
    objects: int
    us: Spread
    hit_rate: float
    target_us: float = 0.0


class PolicyFigures(msgspec.Struct, frozen=True):
    """`trace` is the name of the file, "" for made requests; `blocks` are those of all its requests."""

    trace: str
    requests: int
    blocks: int
    rounds: int
    rows: list[PolicyRow]


def policy_tables(figures: PolicyFigures) -> list[Table]:
    """Return one table."""
    of = figures.trace or "synthetic requests"
    table = new_table(
        f"policy ({of}, {figures.blocks} blocks)",
        "objects in L1",
        "CPU time per block",
        "min to max",
        "target",
        "block hit rate",
    )
    for row in figures.rows:
        target = f"{row.target_us:.0f} µs" if row.target_us else ""
        rate = f"{row.hit_rate:.1%}"
        table.add_row(row.policy, str(row.objects), f"{row.us.median:.2f} µs", format_range(row.us), target, rate)
    return [table]
