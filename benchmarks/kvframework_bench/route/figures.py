"""The figures of `kvframework bench route` and their tables."""

from __future__ import annotations

import msgspec
from rich.table import Table

from kvframework_bench.console import new_table


class RouteFigure(msgspec.Struct, frozen=True):
    """One figure of a router. Times are of the processor: other processes do not lengthen them."""

    name: str
    value: float
    unit: str


class RouteScore(msgspec.Struct, frozen=True):
    """Scores of a prompt: the median of the whole, and of the longest time in which nothing else could run."""

    tokens: int
    nodes: int
    having: int
    whole_ms: float
    longest_step_ms: float


class RouteFigures(msgspec.Struct, frozen=True):
    """`measured` of an index for `blocks` blocks of `nodes` publishers; `thousand` is arithmetic on it."""

    blocks: int
    nodes: int
    measured: list[RouteFigure]
    scores: list[RouteScore]
    thousand: list[RouteFigure]


def route_tables(figures: RouteFigures) -> list[Table]:
    """Return one table each for what was measured, for the scores, and for a thousand nodes."""
    scores = new_table("prompt sent to /score", "nodes", "nodes with the prompt", "p50", "longest step")
    for row in figures.scores:
        times = f"{row.whole_ms:.1f} ms", f"{row.longest_step_ms:.1f} ms"
        scores.add_row(f"{row.tokens // 1024}k tokens", f"{row.nodes:,}", f"{row.having:,}", *times)
    return [_table("a router", figures.measured), scores, _table("a thousand nodes", figures.thousand)]


def _table(title: str, rows: list[RouteFigure]) -> Table:
    table = new_table(title, "measured")
    for row in rows:
        number = f"{row.value:,.1f}" if row.value < 100 else f"{row.value:,.0f}"
        table.add_row(row.name, f"{number.removesuffix('.0')} {row.unit}")
    return table
