"""Owns how the figures of `kvframework bench l2` look."""

from __future__ import annotations

from rich.table import Table

from kvframework.api import ByteSize
from kvframework.bench.cells import latency_cells, new_table, not_measured_table, range_cell, rate_cells, share_cells
from kvframework.bench.l2.document import (
    DiskFigures,
    EngineRow,
    L2Figures,
    MemoryRow,
    RedisFigures,
    StalledRow,
)


def l2_tables(figures: L2Figures) -> list[Table]:
    """A table for each part that has figures, and one for what has none."""
    made = []
    if figures.redis is not None:
        made.append(_redis(figures.redis))
    if figures.engine:
        made.append(_engine(figures.engine))
    if figures.disk is not None:
        made.append(_disk(figures.disk))
    if figures.stalled:
        made.append(_stalled(figures.stalled))
    if figures.memory:
        made.append(_memory(figures.memory))
    if figures.not_measured:
        made.append(not_measured_table(figures.not_measured))
    return made


def _redis(figures: RedisFigures) -> Table:
    title = f"tier redis, redis-server {figures.version}, Unix socket"
    table = new_table(title, "GB/s", "min to max", "of bare client", "min to max", "reach")
    for row in figures.rows:
        name = f"{ByteSize(row.value_bytes)} {row.operation}"
        if row.tool_gb_s is not None:
            table.add_row(f"{name}, redis-benchmark", *rate_cells(row.tool_gb_s))
        table.add_row(f"{name}, bare client, {row.bare_way}", *rate_cells(row.bare_gb_s))
        table.add_row(f"{name}, tier", *rate_cells(row.tier_gb_s), *share_cells(row.of_bare), f"{row.reach:g} x")
    return table


def _engine(rows: list[EngineRow]) -> Table:
    table = new_table("Redis to engine", "GB/s", "min to max", "of bare client", "min to max")
    for row in rows:
        name = f"{row.shape} ({ByteSize(row.nbytes)} in objects of {ByteSize(row.object_bytes)})"
        table.add_row(f"{name}, bare client, {row.bare_way}", *rate_cells(row.bare_gb_s))
        table.add_row(f"{row.shape}, LOOKUP until it is pinned in L1", *rate_cells(row.to_l1_gb_s))
        ends = f"{row.shape}, LOOKUP, polls and RETRIEVE"
        table.add_row(ends, *rate_cells(row.to_engine_gb_s), *share_cells(row.of_bare))
    return table


def _disk(figures: DiskFigures) -> Table:
    headers = ["in page cache", "plain GB/s", "tier GB/s", "min to max", "of plain", "min to max"]
    table = new_table(f"tier filesystem, {figures.file_system}", *headers)
    for row in figures.rows:
        name = f"{ByteSize(row.value_bytes)} {row.operation}"
        plain = f"{row.plain_gb_s.median:.2f}"
        table.add_row(name, f"{row.cached:.0%}", plain, *rate_cells(row.tier_gb_s), *share_cells(row.of_plain))
    return table


def _stalled(rows: list[StalledRow]) -> Table:
    table = new_table("LOOKUP of what L1 has", "p50", "p99", "to none", "min to max", "tier at the end")
    for row in rows:
        name = f"{row.tokens // 1024}k tokens"
        table.add_row(f"{name}, no L2", *latency_cells(row.without_l2))
        state = f"circuit {row.tier_state}, {row.write_pending} to write"
        ratio = f"{row.ratio.median:.2f} x"
        table.add_row(f"{name}, stalled Redis", *latency_cells(row.stalled), ratio, range_cell(row.ratio), state)
    return table


def _memory(rows: list[MemoryRow]) -> Table:
    table = new_table("memory of the server besides its arena", "moved", "an object", "grew by", "prompt", "in Redis")
    for row in rows:
        moved, one = ByteSize(row.nbytes), ByteSize(row.object_bytes)
        sizes = [f"{nbytes / (1 << 20):.1f} MiB" for nbytes in (row.growth_bytes, row.prompt_bytes, row.stored_bytes)]
        table.add_row(f"codec {row.codec}, {row.direction}", str(moved), str(one), *sizes)
    return table
