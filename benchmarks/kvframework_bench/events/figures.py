"""The figures of `kvframework bench events` and their tables."""

from __future__ import annotations

import msgspec
from rich.table import Table

from kvframework_bench.console import format_latency, format_range, format_ratio, new_table
from kvframework_bench.observe.figures import AGAIN, NONE, ObservedLookup
from kvframework_bench.rounds import Spread

EVENTS = "events"
TARGET_US = 3.0


class TellingCost(msgspec.Struct, frozen=True):
    """Processor time a chunk, in microseconds; `target_us` is 0 for none."""

    name: str
    us: Spread
    target_us: float = 0.0


class EventsFigures(msgspec.Struct, frozen=True):
    """`costs` of chunks of 256 tokens as 16 blocks. Each round measures each server for `seconds`, and stores prompts
    in it beforehand: `batches` were announced by the one with `[events]`, all of which a reader has read."""

    seed: int
    rounds: int
    seconds: float
    batches: int
    costs: list[TellingCost]
    lookups: list[ObservedLookup]


def events_tables(figures: EventsFigures) -> list[Table]:
    """Return one table for what telling costs by itself, and one for the lookups beside it."""
    costs = new_table("cost of announcing a chunk of 256 tokens", "CPU time", "min to max", "target")
    for cost in figures.costs:
        target = f"{cost.target_us:.0f} µs" if cost.target_us else ""
        costs.add_row(cost.name, f"{cost.us.median:.2f} µs", format_range(cost.us), target)
    headers = ["p50", "p99", f"p50 ratio to {NONE}", "min to max", f"p99 ratio to {NONE}", "min to max", "target"]
    table = new_table("LOOKUP", *headers)
    for row in figures.lookups:
        ratios = [*format_ratio(row.p50_ratio), *format_ratio(row.p99_ratio)]
        target = "" if row.state in (NONE, AGAIN) else "within the noise"
        table.add_row(f"{row.lookup}, {row.state}", *format_latency(row.latency), *ratios, target)
    return [costs, table]
