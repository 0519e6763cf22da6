"""The figures of `kvframework bench contention` and their tables. Rates are GB (10^9 bytes) a second."""

from __future__ import annotations

import msgspec
from rich.table import Table

from kvframework.api.plugin import ByteSize
from kvframework.text import short_number
from kvframework_bench.console import (
    format_latency,
    format_range,
    format_rate,
    format_ratio,
    format_time,
    new_table,
    skipped_table,
)
from kvframework_bench.errors import Skipped
from kvframework_bench.rounds import Latency, Spread


class SpinningTransfers(msgspec.Struct, frozen=True):
    """Stores or retrieves, on a quiet machine and next to the spinners.

    `quiet_ratio_to_copy` and `ratio_to_copy` are shares of the speed of `copy` on a quiet machine, the latter next to
    the spinners; `ratio_to_quiet` is a share of the same transfer's speed there. `target_ratio` is that of
    `ratio_to_copy`.
    """

    operation: str
    quiet_gb_s: Spread
    gb_s: Spread
    quiet_ratio_to_copy: Spread
    ratio_to_copy: Spread
    ratio_to_quiet: Spread
    target_ratio: float


class SpinningShape(msgspec.Struct, frozen=True):
    """One shape's figures. `spun_cores` is the share of a core that each spinner had while it was not stopped.
    `copy_ratio_to_quiet` is the share of `copy`'s own speed that is left next to the spinners. `verified` says that
    every byte was compared after the first and after the last round, next to the spinners."""

    shape: str
    nbytes: int
    rounds: int
    verified: bool
    spinners: int
    spun_cores: Spread
    copy_name: str
    copy_gb_s: Spread
    copy_ratio_to_quiet: Spread
    transfers: list[SpinningTransfers]


class StoringLookup(msgspec.Struct, frozen=True):
    """LOOKUP of a prompt wholly in L1. `p50_ratio` is taken round by round, `p99_ratio` over all rounds; `target_ratio`
    is that of the latter."""

    tokens: int
    quiet: Latency
    storing: Latency
    p50_ratio: Spread
    p99_ratio: float
    target_ratio: float


class StoringFigures(msgspec.Struct, frozen=True):
    """The stores of the other client meanwhile: prompts of `prompt_bytes`, their number a round, and the speed of its
    own."""

    shape: str
    prompt_bytes: int
    stores: Spread
    gb_s: Spread
    lookups: list[StoringLookup]


class HitRow(msgspec.Struct, frozen=True):
    """One hit: LOOKUP, retrieve and free of a request that is hashed. Processor time of all threads of the engine's
    process, in microseconds: `processor_us` of it all, `copy_us` of the copy, `overhead_us` of the rest, hit by hit;
    `asking_us` is the part of that rest in the asking thread, the others are the connection's. `wall_us` is the wall
    time. `target_us` is meant for the median of `overhead_us`."""

    shape: str
    tokens: int
    nbytes: int
    hits: int
    wall_us: Spread
    processor_us: Spread
    copy_us: Spread
    overhead_us: Spread
    asking_us: Spread
    target_us: float


class HotSpot(msgspec.Struct, frozen=True):
    """A function under a profiler, which makes all of them slower: calls and own time a hit, and its share of the own
    times of all."""

    function: str
    calls: float
    own_us: float
    share: float


class HitFigures(msgspec.Struct, frozen=True):
    """`hot_spots` are of `profiled` hits of the shape `profiled_shape`, in the asking thread, without the copy."""

    rows: list[HitRow]
    profiled_shape: str
    profiled: int
    hot_spots: list[HotSpot]


class ContentionFigures(msgspec.Struct, frozen=True):
    """The figures of all parts. A part that was left out or not asked for is None or empty."""

    spinning: list[SpinningShape]
    storing: StoringFigures | None
    hit: HitFigures | None
    skipped: list[Skipped]


def contention_tables(figures: ContentionFigures) -> list[Table]:
    """Return one or two tables for each part that has figures, and one for those without."""
    made = []
    if figures.spinning:
        made.append(_spinning(figures.spinning))
    if figures.storing is not None:
        made.append(_storing(figures.storing))
    if figures.hit is not None:
        made += [_hit(figures.hit), _hot_spots(figures.hit.hot_spots, figures.hit)]
    if figures.skipped:
        made.append(skipped_table(figures.skipped))
    return made


def _spinning(shapes: list[SpinningShape]) -> Table:
    spinners = shapes[0].spinners
    title = f"transfers beside {spinners} busy process{'es' if spinners > 1 else ''}"
    headers = [
        "GB/s alone",
        "GB/s beside it",
        "min to max",
        "ratio to `copy` alone",
        "ratio to `copy` beside it",
        "min to max",
        "ratio to alone",
        "target",
    ]
    table = new_table(title, *headers, "CPU of a busy process")
    for shape in shapes:
        spun = f"{shape.spun_cores.median:.2f} cores"
        copied = ["", "", "1.00 x", "", "", f"{shape.copy_ratio_to_quiet.median:.2f} x", "", spun]
        table.add_row(f"{shape.shape}, `copy` ({shape.copy_name})", f"{shape.copy_gb_s.median:.2f}", *copied)
        for row in shape.transfers:
            table.add_row(
                f"{shape.shape}, {row.operation} ({ByteSize(shape.nbytes)})",
                f"{row.quiet_gb_s.median:.2f}",
                *format_rate(row.gb_s),
                f"{row.quiet_ratio_to_copy.median:.2f} x",
                *format_ratio(row.ratio_to_copy),
                f"{row.ratio_to_quiet.median:.2f} x",
                f"{short_number(row.target_ratio)} x",
            )
    return table


def _storing(figures: StoringFigures) -> Table:
    headers = [
        "p50",
        "p99",
        "p50 beside stores",
        "p99",
        "p50 ratio to alone",
        "min to max",
        "p99 ratio to alone",
        "target",
    ]
    table = new_table("LOOKUP beside a storing client", *headers)
    for row in figures.lookups:
        table.add_row(
            f"{row.tokens // 1024}k tokens, hit",
            *format_latency(row.quiet),
            *format_latency(row.storing),
            f"{row.p50_ratio.median:.2f} x",
            format_range(row.p50_ratio),
            f"{row.p99_ratio:.2f} x",
            f"{short_number(row.target_ratio)} x",
        )
    stored = f"{figures.stores.median:.0f} stores a round, {figures.gb_s.median:.2f} GB/s"
    table.add_row(f"the storing client ({figures.shape}, {ByteSize(figures.prompt_bytes)}): {stored}")
    return table


def _hit(figures: HitFigures) -> Table:
    headers = [
        "elapsed time",
        "CPU time",
        "CPU time of the copy",
        "other CPU time",
        "min to max",
        "target",
        "of which LOOKUP",
    ]
    table = new_table("CPU time of the engine's process for a hit", *headers)
    for row in figures.rows:
        times = [format_time(each.median) for each in (row.wall_us, row.processor_us, row.copy_us, row.overhead_us)]
        table.add_row(
            f"{row.shape}, {row.tokens} tokens ({ByteSize(row.nbytes)})",
            *times,
            _format_times(row.overhead_us),
            format_time(row.target_us),
            format_time(row.asking_us.median),
        )
    return table


def _hot_spots(spots: list[HotSpot], figures: HitFigures) -> Table:
    title = (
        f"CPU time by function: {figures.profiled_shape}, {figures.profiled} hits under a profiler, without the copy"
    )
    table = new_table(title, "calls per hit", "own CPU time", "share")
    for spot in spots:
        table.add_row(spot.function, f"{spot.calls:.1f}", format_time(spot.own_us), f"{spot.share:.0%}")
    return table


def _format_times(us: Spread) -> str:
    return f"{format_time(us.min)} to {format_time(us.max)}"
