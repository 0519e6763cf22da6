"""Owns how the figures look: tables, and panels for `kvframework.bench.plot`. Pure."""

from __future__ import annotations

from rich import box
from rich.table import Table

from benchmarks.lmcache_server.document import ECHO, SideBySide
from kvframework.api import ByteSize
from kvframework.bench.cells import new_table, range_cell, rate_cells, share_cells
from kvframework.bench.panels import Bar, Bars, Panel, spread_bar
from kvframework.bench.tables import machine_line


def about(document: SideBySide) -> str:
    """The machine and all versions, in one line."""
    peers = ", ".join(f"{name} {version}" for name, version in document.versions.items())
    return f"{machine_line(document.machine)}, {peers}"


def side_tables(document: SideBySide, *, markdown: bool) -> list[Table]:
    """Store and retrieve as shares of `copy`, LOOKUP in milliseconds."""
    transfers = new_table(
        "shape, path, contender",
        "copy GB/s",
        "store GB/s",
        "of `copy`",
        "min to max",
        "retrieve GB/s",
        "of `copy`",
        "min to max",
    )
    for row in document.transfers:
        store, retrieve = rate_cells(row.store_gb_s)[0], rate_cells(row.retrieve_gb_s)[0]
        transfers.add_row(
            f"{row.shape} ({ByteSize(row.nbytes)}), {row.path}, {row.contender}",
            rate_cells(row.copy_gb_s)[0],
            store,
            *share_cells(row.store),
            retrieve,
            *share_cells(row.retrieve),
        )
    lookups = new_table("LOOKUP, all in L1", "p50 ms", "p99 ms", "p50 to echo", "min to max")
    for looked in document.lookups:
        p50, p99 = (f"{us / 1000:.2f}" for us in (looked.latency.p50_us, looked.latency.p99_us))
        name = f"{looked.tokens // 1024}k tokens, {looked.what}"
        lookups.add_row(name, p50, p99, f"{looked.to_echo.median:.1f} x", range_cell(looked.to_echo))
    for table in (transfers, lookups):
        table.box = box.MARKDOWN if markdown else box.SIMPLE_HEAD
    return [transfers, lookups]


def side_panels(document: SideBySide) -> list[Panel]:
    """Shares of `copy` over the arena and over the wire, and lookups."""
    made: list[Panel] = []
    for path in dict.fromkeys(row.path for row in document.transfers):
        rows = [row for row in document.transfers if row.path == path]
        bars = [
            spread_bar(f"{row.shape}, {word}, {row.contender}", getattr(row, word), kind=row.contender)
            for shape in dict.fromkeys(row.shape for row in rows)
            for word in ("store", "retrieve")
            for row in rows
            if row.shape == shape
        ]
        made.append(Bars(f"share of the fastest plain copy, {path} path", "x", bars))
    looked = [
        Bar(
            f"{row.tokens // 1024}k, {row.what}",
            row.latency.p50_us / 1000,
            row.latency.p50_us / 1000,
            row.latency.p99_us / 1000,
            kind=row.what.partition(",")[0] if row.what != ECHO else "reference",
        )
        for row in document.lookups
    ]
    made.append(Bars("LOOKUP of tokens in L1, p50, up to p99", "ms", looked, log=True))
    return made
