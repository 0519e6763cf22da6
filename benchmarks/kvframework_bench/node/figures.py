"""The figures of `kvframework bench node` and their table."""

from __future__ import annotations

import msgspec
from rich.table import Table

from kvframework_bench.console import format_latency, new_table
from kvframework_bench.rounds import Latency, Spread


class NodeRow(msgspec.Struct, frozen=True):
    """One way to serve the node: `lookups` of the schedulers, `loads` of the workers until their bytes may be read,
    both from the time at which they were to begin. `cores` is what all threads of the server use, `server_us` the same
    for each request of an engine, all its messages together, and `ratio_to_echo` that in units of a bare echo's."""

    way: str
    lookups: Latency
    loads: Latency
    requests_s: Spread
    cores: Spread
    server_us: Spread
    ratio_to_echo: Spread


class NodeFigures(msgspec.Struct, frozen=True):
    """`engines` of `ranks` ranks; each of their clients has `rate` requests a second, of `chunks` chunks."""

    engines: int
    ranks: int
    rate: float
    chunks: int
    seed: int
    rows: list[NodeRow]


def node_tables(figures: NodeFigures) -> list[Table]:
    clients = figures.engines * (figures.ranks + 1)
    title = f"{figures.engines} engines x {figures.ranks} ranks, {clients} clients, {figures.rate:.0f} requests/s each"
    headers = (
        "requests/s",
        "LOOKUP p50",
        "LOOKUP p99",
        "load p50",
        "load p99",
        "server CPU, cores",
        "server CPU per request",
        "ratio to echo",
    )
    table = new_table(title, *headers)
    for row in figures.rows:
        table.add_row(
            row.way,
            f"{row.requests_s.median:,.0f}",
            *format_latency(row.lookups),
            *format_latency(row.loads),
            f"{row.cores.median:.2f}",
            f"{row.server_us.median:.0f} µs",
            f"{row.ratio_to_echo.median:.2f} x",
        )
    return [table]
