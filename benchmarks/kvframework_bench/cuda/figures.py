"""The figures of `kvframework bench cuda` and their tables. Rates are GB (10^9 bytes) a second."""

from __future__ import annotations

import msgspec
from rich.table import Table

from kvframework.api.plugin import ByteSize
from kvframework.text import short_number
from kvframework_bench.console import format_latency, format_ratio, format_time, new_table, skipped_table
from kvframework_bench.errors import Skipped
from kvframework_bench.rounds import Latency, Spread


class Gpu(msgspec.Struct, frozen=True):
    """The GPU. `cuda` is the driver's version of CUDA, `driver` its own version and `link` its connection; "" where the
    kernel has no answer."""

    name: str
    memory_bytes: int
    multiprocessors: int
    compute_capability: str
    cuda: str
    driver: str
    bindings: str
    link: str


class Moved(msgspec.Struct, frozen=True):
    """Transfers of one kind, and plain copies of as many bytes in the same direction (or both at once):
    `ratio_to_reference` is the share of their speed, taken round by round."""

    gb_s: Spread
    reference_gb_s: Spread
    ratio_to_reference: Spread


class TransferRow(msgspec.Struct, frozen=True):
    """One step of a shape. `fragment_bytes` is the contiguous part of one block and one layer; `both` is a store and a
    retrieve at once. `target_ratio` is meant for the median of each `ratio_to_reference`."""

    engine: str
    shape: str
    block_tokens: int
    fragment_bytes: int
    chunks: int
    nbytes: int
    rounds: int
    store: Moved
    retrieve: Moved
    both: Moved
    target_ratio: float


class SubmitRow(msgspec.Struct, frozen=True):
    """The engine thread's time for a submit; `target_us` is meant for the p99."""

    operation: str
    chunks: int
    blocks: int
    latency: Latency
    target_us: float


class MatmulRow(msgspec.Struct, frozen=True):
    """The loop's time next to transfers in units of its time without, by the GPU's clock; `gb_s` is the speed of the
    transfers meanwhile. The engine "plain" is a plain pinned copy."""

    engine: str
    operation: str
    slowdown: Spread
    gb_s: Spread


class MatmulFigures(msgspec.Struct, frozen=True):
    """The figures of `matmul`. `quiet_tflop_s` is the loop's speed alone, with square matrices of `size`."""

    size: int
    shape: str
    chunks: int
    quiet_tflop_s: Spread
    rows: list[MatmulRow]


class StepFigures(msgspec.Struct, frozen=True):
    """The figures of `decode`. Steps read `step_bytes`; `quiet_s` is the p99 of their times alone, and a row's
    `slowdown` is that of the p99."""

    step_bytes: int
    shape: str
    chunks: int
    quiet_s: Spread
    rows: list[MatmulRow]


class SweepRow(msgspec.Struct, frozen=True):
    """Fragments of one size, moved by copy engines and by the kernel: rates, and shares of a plain copy's speed."""

    operation: str
    fragment_bytes: int
    nbytes: int
    dma_gb_s: Spread
    kernel_gb_s: Spread
    dma_ratio: Spread
    kernel_ratio: Spread


class SweepFigures(msgspec.Struct, frozen=True):
    """`cross` is the smallest measured size from which on copy engines are at least as fast as the kernel both ways:
    the right value of `kernel_below`. None: the kernel is faster to the end."""

    rows: list[SweepRow]
    cross: int | None


class CudaFigures(msgspec.Struct, frozen=True):
    """The figures of all parts. A part that was left out or not asked for is None or empty. `verified` says that every
    byte was compared, for each shape and each engine, before anything was measured and behind the last round of each
    step."""

    gpu: Gpu
    verified: bool
    transfers: list[TransferRow]
    submits: list[SubmitRow]
    matmul: MatmulFigures | None
    sweep: SweepFigures | None
    skipped: list[Skipped]
    decode: StepFigures | None = None


def cuda_tables(figures: CudaFigures) -> list[Table]:
    """Return the GPU, a table or more for each part that has figures, and one for those without."""
    made = [_gpu(figures.gpu)]
    for engine in dict.fromkeys(row.engine for row in figures.transfers):
        made.append(_transfers(engine, [row for row in figures.transfers if row.engine == engine]))
    if figures.submits:
        made.append(_submits(figures.submits))
    if figures.matmul is not None:
        made.append(_matmul(figures.matmul))
    if figures.decode is not None:
        made.append(_decode(figures.decode))
    if figures.sweep is not None:
        made.append(_sweep(figures.sweep))
    if figures.skipped:
        made.append(skipped_table(figures.skipped))
    return made


def _gpu(gpu: Gpu) -> Table:
    table = new_table("GPU", "memory", "multiprocessors", "compute capability", "link", "driver", "CUDA", "bindings")
    table.add_row(
        gpu.name,
        str(ByteSize(gpu.memory_bytes)),
        str(gpu.multiprocessors),
        gpu.compute_capability,
        gpu.link or "unknown",
        gpu.driver or "unknown",
        gpu.cuda,
        gpu.bindings,
    )
    return table


def _transfers(engine: str, rows: list[TransferRow]) -> Table:
    headers = ["block, tokens", "fragment size", "chunks"]
    for kind in ("store", "retrieve", "both"):
        headers += [f"{kind} GB/s", "ratio to plain", "min to max"]
    table = new_table(f"engine {engine}", *headers, "target")
    for row in rows:
        cells = [str(row.block_tokens), str(ByteSize(row.fragment_bytes)), f"{row.chunks} ({ByteSize(row.nbytes)})"]
        for moved in (row.store, row.retrieve, row.both):
            cells += [f"{moved.gb_s.median:.2f}", *format_ratio(moved.ratio_to_reference)]
        table.add_row(row.shape, *cells, f"{short_number(row.target_ratio)} x")
    return table


def _submits(rows: list[SubmitRow]) -> Table:
    table = new_table("time of a submit in the engine's thread", "block ids", "p50", "p99", "target")
    for row in rows:
        name = f"{row.operation} of {row.chunks} chunk{'s' if row.chunks > 1 else ''}"
        table.add_row(name, str(row.blocks), *format_latency(row.latency), format_time(row.target_us))
    return table


def _matmul(figures: MatmulFigures) -> Table:
    table = new_table(
        f"bfloat16 products of {figures.size} x {figures.size}, beside",
        "ratio of time to no transfers",
        "min to max",
        "transfers GB/s",
    )
    quiet = figures.quiet_tflop_s
    table.add_row(f"no transfers: {quiet.median:.0f} TFLOP/s ({quiet.min:.0f} to {quiet.max:.0f})", "1.00 x", "", "")
    for row in figures.rows:
        share = format_ratio(row.slowdown)
        table.add_row(f"{row.operation}s, {_copier(row.engine)}", *share, f"{row.gb_s.median:.2f}")
    table.add_row(f"transferred: {figures.shape}, {figures.chunks} chunks at a time")
    return table


def _decode(figures: StepFigures) -> Table:
    table = new_table(
        f"steps that read {ByteSize(figures.step_bytes)}, beside",
        "p99 ratio to no transfers",
        "min to max",
        "transfers GB/s",
    )
    table.add_row(f"no transfers: p99 {1000 * figures.quiet_s.median:.2f} ms", "1.00 x", "", "")
    for row in figures.rows:
        share = format_ratio(row.slowdown)
        table.add_row(f"{row.operation}s, {_copier(row.engine)}", *share, f"{row.gb_s.median:.2f}")
    table.add_row(f"transferred: {figures.shape}, {figures.chunks} chunks at a time")
    return table


def _copier(engine: str) -> str:
    return "a plain copy" if engine == "plain" else f"engine {engine}"


def _sweep(figures: SweepFigures) -> Table:
    table = new_table(
        "fragment size",
        "operation",
        "dma GB/s",
        "ratio to plain",
        "kernel GB/s",
        "ratio to plain",
        "ratio of dma to kernel",
    )
    for row in figures.rows:
        table.add_row(
            str(ByteSize(row.fragment_bytes)),
            row.operation,
            f"{row.dma_gb_s.median:.2f}",
            f"{row.dma_ratio.median:.2f} x",
            f"{row.kernel_gb_s.median:.2f}",
            f"{row.kernel_ratio.median:.2f} x",
            f"{row.dma_gb_s.median / row.kernel_gb_s.median:.2f} x",
        )
    if figures.cross is None:
        table.add_row("the kernel is faster for every fragment size")
    else:
        cross = ByteSize(figures.cross)
        table.add_row(f'dma is as fast both ways from {cross} on: kernel_below = "{cross}"')
    return table
