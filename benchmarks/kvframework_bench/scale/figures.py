"""The figures of `kvframework bench scale` and their tables."""

from __future__ import annotations

import msgspec
from rich.table import Table

from kvframework_bench.console import format_latency, new_table
from kvframework_bench.rounds import Latency, Spread


class RatioToEcho(msgspec.Struct, frozen=True):
    """Next to a bare ZMQ echo of a LOOKUP's size with as many clients: requests a second as a share of its echoes, and
    latencies in units of its latencies."""

    rate: Spread
    p50: Spread
    p99: float


class ScaleRow(msgspec.Struct, frozen=True):
    """One operation with `clients` that send requests without pause, and `objects` in L1.

    `cost` is the wall time for a request of any client: one divided by the requests a second. `server_us` is processor
    time of the server (for an echo: of the bare peer), all its threads. Fields that end with `to_first` are in units of
    the first step's. `ratio_to_echo` is None for the echo.
    """

    operation: str
    clients: int
    objects: int
    latency: Latency
    requests_s: Spread
    server_us: Spread
    cost_to_first: Spread
    server_to_first: Spread
    p50_to_first: Spread
    p99_to_first: float
    ratio_to_echo: RatioToEcho | None


class ScaleFigures(msgspec.Struct, frozen=True):
    """A request is of `chunks` objects of `object_bytes`; each takes `slot_bytes` of the arena. `skipped` names the
    steps that did not fit into memory."""

    seed: int
    chunks: int
    object_bytes: int
    slot_bytes: int
    request_bytes: int
    by_clients: list[ScaleRow]
    by_objects: list[ScaleRow]
    skipped: list[str]


_HEADERS = (
    "requests/s",
    "p50",
    "p99",
    "server CPU per request",
    "client and server CPU, ratio to first row",
    "server CPU, ratio",
    "p50, ratio",
    "p99, ratio",
    "requests/s, ratio to echo",
    "p50, ratio to echo",
    "p99, ratio to echo",
)


def scale_tables(figures: ScaleFigures) -> list[Table]:
    """Return one table for clients, one for objects, one for skipped steps if there are any."""
    made = []
    for title, rows in (("clients", figures.by_clients), ("objects", figures.by_objects)):
        table = new_table(f"requests of {figures.chunks} objects, {title}", *_HEADERS)
        for row in rows:
            table.add_row(f"{row.operation}, {row.clients if title == 'clients' else row.objects:,}", *_cells(row))
        made.append(table)
    if figures.skipped:
        table = new_table("skipped")
        for line in figures.skipped:
            table.add_row(line)
        made.append(table)
    return made


def _cells(row: ScaleRow) -> list[str]:
    echo = row.ratio_to_echo
    return [
        f"{row.requests_s.median:,.0f}",
        *format_latency(row.latency),
        f"{row.server_us.median:.0f} µs",
        f"{row.cost_to_first.median:.2f} x",
        f"{row.server_to_first.median:.2f} x",
        f"{row.p50_to_first.median:.2f} x",
        f"{row.p99_to_first:.2f} x",
        *((f"{echo.rate.median:.2f} x", f"{echo.p50.median:.2f} x", f"{echo.p99:.2f} x") if echo else ("-",) * 3),
    ]
