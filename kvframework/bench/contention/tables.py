"""Owns how the figures of `kvframework bench contention` look."""

from __future__ import annotations

from rich.table import Table

from kvframework.api import ByteSize
from kvframework.bench.cells import (
    latency_cells,
    new_table,
    not_measured_table,
    range_cell,
    rate_cells,
    share_cells,
    time_cell,
)
from kvframework.bench.contention.document import (
    ContentionFigures,
    HitFigures,
    HotSpot,
    SpinningShape,
    StoringFigures,
)
from kvframework.bench.statistics import Spread


def contention_tables(figures: ContentionFigures) -> list[Table]:
    """One or two tables for each part that has figures, and one for what has none."""
    made = []
    if figures.spinning:
        made.append(_spinning(figures.spinning))
    if figures.storing is not None:
        made.append(_storing(figures.storing))
    if figures.hit is not None:
        made += [_hit(figures.hit), _hot_spots(figures.hit.hot_spots, figures.hit)]
    if figures.not_measured:
        made.append(not_measured_table(figures.not_measured))
    return made


def _spinning(shapes: list[SpinningShape]) -> Table:
    spinners = shapes[0].spinners
    title = f"beside {spinners} spinner{'s' if spinners > 1 else ''}"
    headers = ["quiet GB/s", "GB/s", "min to max", "quiet of `copy`", "of `copy`", "min to max", "of quiet", "reach"]
    table = new_table(title, *headers, "a spinner had")
    for shape in shapes:
        spun = f"{shape.spun_cores.median:.2f} cores"
        copied = ["", "", "1.00 x", "", "", f"{shape.copy_of_quiet.median:.2f} x", "", spun]
        table.add_row(f"{shape.shape}, `copy` ({shape.copy_name})", f"{shape.copy_gb_s.median:.2f}", *copied)
        for row in shape.transfers:
            table.add_row(
                f"{shape.shape}, {row.operation} ({ByteSize(shape.nbytes)})",
                f"{row.quiet_gb_s.median:.2f}",
                *rate_cells(row.gb_s),
                f"{row.quiet_of_copy.median:.2f} x",
                *share_cells(row.of_copy),
                f"{row.of_quiet.median:.2f} x",
                f"{row.reach:g} x",
            )
    return table


def _storing(figures: StoringFigures) -> Table:
    headers = ["p50", "p99", "beside p50", "p99", "p50 to quiet", "min to max", "p99 to quiet", "reach"]
    table = new_table("LOOKUP beside a client that stores", *headers)
    for row in figures.lookups:
        table.add_row(
            f"{row.tokens // 1024}k tokens, hit",
            *latency_cells(row.quiet),
            *latency_cells(row.storing),
            f"{row.p50_ratio.median:.2f} x",
            range_cell(row.p50_ratio),
            f"{row.p99_ratio:.2f} x",
            f"{row.reach:g} x",
        )
    stored = f"{figures.stores.median:.0f} stores a round, {figures.gb_s.median:.2f} GB/s"
    table.add_row(f"the other stored ({figures.shape}, {ByteSize(figures.prompt_bytes)}): {stored}")
    return table


def _hit(figures: HitFigures) -> Table:
    headers = ["went by", "processor", "the copy", "besides", "min to max", "reach", "of it asking"]
    table = new_table("a hit, processor time of the engine's process", *headers)
    for row in figures.rows:
        times = [time_cell(each.median) for each in (row.wall_us, row.processor_us, row.copy_us, row.besides_us)]
        table.add_row(
            f"{row.shape}, {row.tokens} tokens ({ByteSize(row.nbytes)})",
            *times,
            _times_cell(row.besides_us),
            time_cell(row.reach_us),
            time_cell(row.asking_us.median),
        )
    return table


def _hot_spots(spots: list[HotSpot], figures: HitFigures) -> Table:
    title = f"where it goes: {figures.profiled_shape}, {figures.profiled} hits under a profiler, the copy left out"
    table = new_table(title, "calls", "own time", "share")
    for spot in spots:
        table.add_row(spot.function, f"{spot.calls:.1f}", time_cell(spot.own_us), f"{spot.share:.0%}")
    return table


def _times_cell(us: Spread) -> str:
    return f"{time_cell(us.min)} to {time_cell(us.max)}"
