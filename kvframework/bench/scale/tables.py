"""Owns how the figures of `kvframework bench scale` look."""

from __future__ import annotations

from rich.table import Table

from kvframework.bench.cells import latency_cells, new_table
from kvframework.bench.scale.document import ScaleFigures, ScaleRow

_HEADERS = (
    "requests/s",
    "p50",
    "p99",
    "server",
    "cost to first",
    "server's",
    "p50",
    "p99",
    "requests/s to echo",
    "p50",
    "p99",
)


def scale_tables(figures: ScaleFigures) -> list[Table]:
    """One table for clients, one for objects, one for what was left out if there is such."""
    made = []
    for title, rows in (("clients", figures.by_clients), ("objects", figures.by_objects)):
        table = new_table(f"requests of {figures.chunks} objects, {title}", *_HEADERS)
        for row in rows:
            table.add_row(f"{row.operation}, {row.clients if title == 'clients' else row.objects:,}", *_cells(row))
        made.append(table)
    if figures.left_out:
        table = new_table("not measured")
        for line in figures.left_out:
            table.add_row(line)
        made.append(table)
    return made


def _cells(row: ScaleRow) -> list[str]:
    echo = row.to_echo
    return [
        f"{row.requests_s.median:,.0f}",
        *latency_cells(row.latency),
        f"{row.server_us.median:.0f} µs",
        f"{row.cost_to_first.median:.2f} x",
        f"{row.server_to_first.median:.2f} x",
        f"{row.p50_to_first.median:.2f} x",
        f"{row.p99_to_first:.2f} x",
        *((f"{echo.rate.median:.2f} x", f"{echo.p50.median:.2f} x", f"{echo.p99:.2f} x") if echo else ("-",) * 3),
    ]
