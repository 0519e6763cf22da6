"""Owns how figures look: one function from a document to its tables, for a terminal or as Markdown."""

from __future__ import annotations

from rich import box
from rich.table import Table

from kvframework.api import ByteSize
from kvframework.bench.cells import latency_cells, new_table, range_cell, rate_cells, share_cells, time_cell
from kvframework.bench.contention.document import ContentionFigures
from kvframework.bench.contention.tables import contention_tables
from kvframework.bench.cuda.document import CudaFigures
from kvframework.bench.cuda.tables import cuda_tables
from kvframework.bench.document import (
    Document,
    HashFigures,
    HostFigures,
    LookupFigures,
    RequestFigures,
    ServerAtRest,
    ShapeFigures,
    StoreFigures,
    Throughput,
)
from kvframework.bench.l2.document import L2Figures
from kvframework.bench.l2.tables import l2_tables
from kvframework.bench.machine import Machine
from kvframework.bench.scale.document import ScaleFigures
from kvframework.bench.scale.tables import scale_tables


def headline(document: Document) -> str:
    """The machine, its GPU if that is what was measured, and the versions, in one line."""
    gpu = f"{document.figures.gpu.name}; " if isinstance(document.figures, CudaFigures) else ""
    return gpu + machine_line(document.machine)


def machine_line(machine: Machine) -> str:
    """The same, of a machine."""
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return (
        f"{machine.cpu}, {machine.cores} cores, {ByteSize(machine.memory_bytes)}, Linux {machine.kernel}; "
        f"Python {machine.python}, {packages}"
    )


def warning(document: Document) -> str:
    """What makes the figures doubtful; "" if nothing does."""
    load, doubts = document.load, []
    if load.busy:
        doubts.append(
            f"the machine is busy: others used {load.others_before:.2f} of {load.cores} cores before and "
            f"{load.others_during:.2f} during the run (load average {load.loadavg_1min:.1f})"
        )
    if document.quick:
        doubts.append("a quick run: sizes and repetitions are small")
    return "; ".join(doubts)


def tables(document: Document, *, markdown: bool = False) -> list[Table]:
    """The tables of one document."""
    figures = document.figures
    if isinstance(figures, HostFigures):
        made = [_copies(figures), _echoes(figures), _transfers(figures.transfers), _server(figures.server)]
    elif isinstance(figures, LookupFigures):
        made = [_requests(figures.requests), _hashing(figures.hashing)]
    elif isinstance(figures, L2Figures):
        made = l2_tables(figures)
    elif isinstance(figures, ScaleFigures):
        made = scale_tables(figures)
    elif isinstance(figures, ContentionFigures):
        made = contention_tables(figures)
    elif isinstance(figures, CudaFigures):
        made = cuda_tables(figures)
    else:
        made = [_store(figures)]
    for table in made:
        table.box = box.MARKDOWN if markdown else box.SIMPLE_HEAD
    return made


def _copies(figures: HostFigures) -> Table:
    table = new_table(f"copy of {ByteSize(figures.copies[0].nbytes)}", "GB/s", "min to max", "")
    for way in figures.copies:
        table.add_row(way.name, *rate_cells(way.gb_s), "`copy`" if way.name == figures.copy else "")
    return table


def _echoes(figures: HostFigures) -> Table:
    table = new_table("bare ZMQ echo, ipc", "p50", "p99")
    for echo in figures.echoes:
        table.add_row(str(ByteSize(echo.nbytes)), *latency_cells(echo.latency))
    return table


def _transfers(transfers: list[Throughput]) -> Table:
    table = new_table(f"bare ZMQ transfer of {ByteSize(transfers[0].nbytes)}, ipc", "GB/s", "min to max")
    for way in transfers:
        table.add_row(way.name, *rate_cells(way.gb_s))
    return table


def _server(server: ServerAtRest) -> Table:
    memory = server.memory
    table = new_table("a server at rest", "", "reach")
    table.add_row("memory besides the arena", f"{memory.besides_shared / 1e6:.1f} MB", "80 MB")
    table.add_row("of it private, file-backed", f"{memory.anon / 1e6:.1f} MB, {memory.file / 1e6:.1f} MB", "")
    table.add_row("start to first answer", f"{server.start_s.median:.2f} s ({range_cell(server.start_s)})", "0.3 s")
    table.add_row("processor", f"{server.idle_cores:.2%} of a core", "0.5 %")
    table.add_row("torch", "loaded" if server.torch_loaded else "not loaded", "not loaded")
    return table


def _requests(requests: list[RequestFigures]) -> Table:
    table = new_table("request", "bytes", "p50", "p99", "echo p50", "echo p99", "p50 to echo", "min to max", "reach")
    for row in requests:
        table.add_row(
            row.name,
            str(row.request_bytes),
            *latency_cells(row.latency),
            *latency_cells(row.echo),
            f"{row.ratio.median:.1f} x",
            range_cell(row.ratio),
            f"{row.reach:g} x" if row.reach else "",
        )
    return table


def _hashing(hashing: list[HashFigures]) -> Table:
    table = new_table(
        "hashing, once a request", "hasher", "p50", "p99", "packed p50", "to one bare pass", "packed", "reach"
    )
    for row in hashing:
        compared = [f"{each.median:.1f} x" if each else "-" for each in (row.ratio, row.packed_ratio)]
        p50, p99 = latency_cells(row.latency)
        table.add_row(
            f"{row.tokens // 1024}k tokens", row.hasher, p50, p99, time_cell(row.packed.p50_us), *compared, "1.2 x"
        )
    return table


def _store(figures: StoreFigures) -> Table:
    wire = figures.path == "wire"
    headers = ["GB/s", "min to max", "first", "of `copy`", "min to max", *(["of bare ZMQ"] if wire else []), "reach"]
    table = new_table(f"{figures.path} path, {figures.blocks} blocks", *headers)
    for shape in figures.shapes:
        copy = shape.copy
        table.add_row(f"{shape.shape}, `copy` ({copy.name})", *rate_cells(copy.gb_s))
        _add_transfers(table, shape, wire=wire)
    return table


def _add_transfers(table: Table, shape: ShapeFigures, *, wire: bool) -> None:
    for name, figures in (("store", shape.store), ("retrieve", shape.retrieve)):
        bare = figures.of_bare_transfer
        table.add_row(
            f"{shape.shape}, {name} ({ByteSize(shape.nbytes)})",
            *rate_cells(figures.gb_s),
            f"{figures.first_gb_s:.2f}",
            *share_cells(figures.of_copy),
            *([f"{bare.median:.2f} x" if bare else "-"] if wire else []),
            "0.8 x of bare ZMQ" if wire else f"{shape.reach:g} x",
        )
