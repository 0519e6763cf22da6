"""Owns how tables and single figures look, whichever bench they are of. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvframework.bench.attempt import NotMeasured
from kvframework.bench.statistics import Latency, Spread


def new_table(*headers: str) -> Table:
    """A table whose first column is text and whose others are figures."""
    table = Table(pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left", no_wrap=True)
    return table


def not_measured_table(rows: Sequence[NotMeasured]) -> Table:
    """Names what could not be measured."""
    table = new_table("not measured", "why", "hint")
    for row in rows:
        table.add_row(row.what, row.why, row.hint)
    return table


def rate_cells(gb_s: Spread) -> tuple[str, str]:
    """Median and range."""
    return f"{gb_s.median:.2f}", range_cell(gb_s)


def share_cells(ratio: Spread) -> tuple[str, str]:
    """Median and range of a ratio."""
    return f"{ratio.median:.2f} x", range_cell(ratio)


def range_cell(spread: Spread) -> str:
    return f"{spread.min:.2f} to {spread.max:.2f}"


def latency_cells(latency: Latency) -> tuple[str, str]:
    """p50 and p99."""
    return time_cell(latency.p50_us), time_cell(latency.p99_us)


def time_cell(us: float) -> str:
    return f"{us:.0f} µs" if us < 1000 else f"{us / 1000:.2f} ms"
