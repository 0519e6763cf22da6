"""The figures of `kvframework bench shards`, their table and their panel."""

from __future__ import annotations

import msgspec
from rich.table import Table

from kvframework_bench.console import format_ratio, new_table
from kvframework_bench.rounds import Spread

TARGET = 1.05


class ShardsRow(msgspec.Struct, frozen=True):
    """A rank of an engine of `tp` that holds `shards` of the `tp_lcm`. `store` and `load`: processor time, as multiples
    of that of the same engine at a server without shards."""

    tp: int
    shards: int
    layout: str
    store: Spread
    load: Spread


class ShardsFigures(msgspec.Struct, frozen=True):
    """Every byte of the first and of the last load was compared."""

    tp_lcm: int
    tokens: int
    rounds: int
    target_ratio: float
    rows: list[ShardsRow]


def shards_tables(figures: ShardsFigures) -> list[Table]:
    """Return one table."""
    table = new_table(
        f"TP size, shards per rank ({figures.tp_lcm} in all)",
        "layout",
        "store CPU, ratio to no shards",
        "min to max",
        "load CPU, ratio to no shards",
        "min to max",
        "target",
    )
    for row in figures.rows:
        ratios = (*format_ratio(row.store), *format_ratio(row.load))
        table.add_row(f"{row.tp}, {row.shards}", row.layout, *ratios, f"{figures.target_ratio:.2f} x")
    return [table]
