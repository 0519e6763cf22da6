"""Owns how the figures of `kvframework bench cuda` look."""

from __future__ import annotations

from rich.table import Table

from kvframework.api import ByteSize
from kvframework.bench.cells import latency_cells, new_table, not_measured_table, share_cells, time_cell
from kvframework.bench.cuda.document import CudaFigures, Gpu, MatmulFigures, SubmitRow, SweepFigures, TransferRow


def cuda_tables(figures: CudaFigures) -> list[Table]:
    """The GPU, a table or more for each part that has figures, and one for what has none."""
    made = [_gpu(figures.gpu)]
    for engine in dict.fromkeys(row.engine for row in figures.transfers):
        made.append(_transfers(engine, [row for row in figures.transfers if row.engine == engine]))
    if figures.submits:
        made.append(_submits(figures.submits))
    if figures.matmul is not None:
        made.append(_matmul(figures.matmul))
    if figures.sweep is not None:
        made.append(_sweep(figures.sweep))
    if figures.not_measured:
        made.append(not_measured_table(figures.not_measured))
    return made


def _gpu(gpu: Gpu) -> Table:
    table = new_table("GPU", "memory", "multiprocessors", "compute capability", "link", "driver", "CUDA", "bindings")
    table.add_row(
        gpu.name,
        str(ByteSize(gpu.memory_bytes)),
        str(gpu.multiprocessors),
        gpu.compute_capability,
        gpu.link or "not told",
        gpu.driver or "not told",
        gpu.cuda,
        gpu.bindings,
    )
    return table


def _transfers(engine: str, rows: list[TransferRow]) -> Table:
    headers = ["block", "fragment", "chunks"]
    for kind in ("store", "retrieve", "both"):
        headers += [f"{kind} GB/s", "of plain", "min to max"]
    table = new_table(f"engine {engine}", *headers, "reach")
    for row in rows:
        cells = [str(row.block_tokens), str(ByteSize(row.fragment_bytes)), f"{row.chunks} ({ByteSize(row.nbytes)})"]
        for moved in (row.store, row.retrieve, row.both):
            cells += [f"{moved.gb_s.median:.2f}", *share_cells(moved.of_plain)]
        table.add_row(row.shape, *cells, f"{row.reach:g} x")
    return table


def _submits(rows: list[SubmitRow]) -> Table:
    table = new_table("a submit, of the engine's thread", "block ids", "p50", "p99", "reach")
    for row in rows:
        name = f"{row.operation} of {row.chunks} chunk{'s' if row.chunks > 1 else ''}"
        table.add_row(name, str(row.blocks), *latency_cells(row.latency), time_cell(row.reach_us))
    return table


def _matmul(figures: MatmulFigures) -> Table:
    table = new_table(
        f"bfloat16 products of {figures.size} x {figures.size}, beside", "time to quiet", "min to max", "moved GB/s"
    )
    quiet = figures.quiet_tflop_s
    table.add_row(f"nothing: {quiet.median:.0f} TFLOP/s ({quiet.min:.0f} to {quiet.max:.0f})", "1.00 x", "", "")
    for row in figures.rows:
        share = share_cells(row.slowdown)
        table.add_row(f"{row.operation}s, {_copier(row.engine)}", *share, f"{row.gb_s.median:.2f}")
    table.add_row(f"moved: {figures.shape}, {figures.chunks} chunks at a time")
    return table


def _copier(engine: str) -> str:
    return "a plain copy" if engine == "plain" else f"engine {engine}"


def _sweep(figures: SweepFigures) -> Table:
    table = new_table("fragments of", "", "dma GB/s", "of plain", "kernel GB/s", "of plain", "dma to kernel")
    for row in figures.rows:
        table.add_row(
            str(ByteSize(row.fragment_bytes)),
            row.operation,
            f"{row.dma_gb_s.median:.2f}",
            f"{row.dma_of_plain.median:.2f} x",
            f"{row.kernel_gb_s.median:.2f}",
            f"{row.kernel_of_plain.median:.2f} x",
            f"{row.dma_gb_s.median / row.kernel_gb_s.median:.2f} x",
        )
    if figures.cross is None:
        table.add_row("the kernel is faster up to the largest")
    else:
        cross = ByteSize(figures.cross)
        table.add_row(f'dma is as fast both ways from {cross} on: kernel_below = "{cross}"')
    return table
