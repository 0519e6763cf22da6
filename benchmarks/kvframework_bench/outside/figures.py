"""The figures of `kvframework bench outside` and their tables, one for each tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from rich.table import Table

from kvframework.api.plugin import ByteSize
from kvframework_bench.console import format_range, new_table, skipped_table
from kvframework_bench.errors import Skipped
from kvframework_bench.outside.cells import Cell
from kvframework_bench.rounds import Spread


class OutsideRow(msgspec.Struct, frozen=True):
    """One workload of one tool against one contender, over all rounds. Times and tokens per second are the tool's;
    ratios are to the engine whose own cache is endless, in the same round, None for that itself or without it.
    `hit` is the share of the prompts' tokens that the engine did not compute."""

    tool: str
    workload: str
    contender: str
    rounds: int
    requests: int
    failed: int
    first_mean_ms: Spread
    first_p50_ms: Spread
    first_p99_ms: Spread
    latency_ms: Spread
    output_tokens_s: Spread
    hit: Spread
    computed_tokens: Spread
    first_mean: Spread | None
    first_p50: Spread | None
    latency: Spread | None
    computed: Spread | None


class ToolFigures(msgspec.Struct, frozen=True):
    """A tool, and what differs from the setting that others publish. `others` is the largest number of cores that other
    processes kept busy during one of its cells."""

    name: str
    version: str
    differs: str
    others: float


class OutsideFigures(msgspec.Struct, frozen=True):
    trace: str
    model: str
    kv_cache_bytes: int
    capacity_bytes: int
    tools: list[ToolFigures]
    rows: list[OutsideRow]
    cells: list[Cell]
    skipped: list[Skipped]


def rows_of(cells: Sequence[Cell], ideal: str) -> list[OutsideRow]:
    """Return a row for each workload and contender of the cells, in their order."""
    keys = dict.fromkeys((cell.tool, cell.workload, cell.contender) for cell in cells)
    return [_row([cell for cell in cells if _key(cell) == key], cells, ideal) for key in keys]


def _key(cell: Cell) -> tuple[str, str, str]:
    return cell.tool, cell.workload, cell.contender


def _row(own: Sequence[Cell], cells: Sequence[Cell], ideal: str) -> OutsideRow:
    tool, workload, contender = _key(own[0])
    floor = {cell.round: cell for cell in cells if _key(cell) == (tool, workload, ideal)} if contender != ideal else {}

    def spread(value: Callable[[Cell], float]) -> Spread:
        return Spread.of([value(cell) for cell in own])

    def ratio(value: Callable[[Cell], float]) -> Spread | None:
        found = [value(cell) / max(value(floor[cell.round]), 1e-9) for cell in own if cell.round in floor]
        return Spread.of(found) if found else None

    return OutsideRow(
        tool,
        workload,
        contender,
        len(own),
        sum(cell.result.completed for cell in own),
        sum(cell.result.failed for cell in own),
        spread(lambda cell: cell.result.first_mean_ms),
        spread(lambda cell: cell.result.first_p50_ms),
        spread(lambda cell: cell.result.first_p99_ms),
        spread(lambda cell: cell.result.latency_mean_ms),
        spread(lambda cell: cell.result.output_tokens_s),
        spread(lambda cell: 1 - cell.computed_tokens / max(cell.prompt_tokens, 1)),
        spread(lambda cell: cell.computed_tokens),
        ratio(lambda cell: cell.result.first_mean_ms),
        ratio(lambda cell: cell.result.first_p50_ms),
        ratio(lambda cell: cell.result.latency_mean_ms),
        ratio(lambda cell: cell.computed_tokens),
    )


def outside_tables(figures: OutsideFigures) -> list[Table]:
    """Return one table for each tool, what was run, and what was not."""
    made = [_tool(each, figures.rows) for each in figures.tools]
    about = new_table("setting", "value")
    about.add_row("trace", figures.trace)
    about.add_row("model", figures.model)
    sizes = f"{ByteSize(figures.kv_cache_bytes)}, {ByteSize(figures.capacity_bytes)}"
    about.add_row("KV cache of the engine, capacity of the offload", sizes)
    for each in figures.tools:
        about.add_row(f"{each.name} {each.version}", each.differs)
        about.add_row(f"{each.name}, most cores busy with others", f"{each.others:.2f}")
    return [*made, about, *[skipped_table(figures.skipped)] * bool(figures.skipped)]


def _tool(tool: ToolFigures, rows: Sequence[OutsideRow]) -> Table:
    table = new_table(
        f"{tool.name} {tool.version}",
        *("requests", "failed", "first token, mean", "ratio to ideal", "min to max", "p50", "ratio to ideal", "p99"),
        *("whole answer, mean", "ratio to ideal", "output tokens/s", "hit rate", "computed tokens", "ratio to ideal"),
    )
    for row in rows:
        if row.tool != tool.name:
            continue
        table.add_row(
            f"{row.workload}, {row.contender}",
            f"{row.requests}",
            f"{row.failed}",
            f"{row.first_mean_ms.median:,.0f} ms",
            _ratio(row.first_mean),
            format_range(row.first_mean) if row.first_mean else "",
            f"{row.first_p50_ms.median:,.0f} ms",
            _ratio(row.first_p50),
            f"{row.first_p99_ms.median:,.0f} ms",
            f"{row.latency_ms.median:,.0f} ms",
            _ratio(row.latency),
            f"{row.output_tokens_s.median:.1f}",
            f"{row.hit.median:.1%}",
            f"{row.computed_tokens.median:,.0f}",
            _ratio(row.computed),
        )
    return table


def _ratio(ratio: Spread | None) -> str:
    return f"{ratio.median:.2f} x" if ratio else ""
