"""Owns how figures look: one function from a document to its tables, for a terminal or as Markdown."""

from __future__ import annotations

from rich import box
from rich.table import Table

from kvframework.api import ByteSize
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
from kvframework.bench.statistics import Latency, Spread


def headline(document: Document) -> str:
    """The machine and the versions, in one line."""
    machine = document.machine
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
    else:
        made = [_store(figures)]
    for table in made:
        table.box = box.MARKDOWN if markdown else box.SIMPLE_HEAD
    return made


def _copies(figures: HostFigures) -> Table:
    table = _table(f"copy of {ByteSize(figures.copies[0].nbytes)}", "GB/s", "min to max", "")
    for way in figures.copies:
        table.add_row(way.name, *_rate(way.gb_s), "`copy`" if way.name == figures.copy else "")
    return table


def _echoes(figures: HostFigures) -> Table:
    table = _table("bare ZMQ echo, ipc", "p50", "p99")
    for echo in figures.echoes:
        table.add_row(str(ByteSize(echo.nbytes)), *_latency(echo.latency))
    return table


def _transfers(transfers: list[Throughput]) -> Table:
    table = _table(f"bare ZMQ transfer of {ByteSize(transfers[0].nbytes)}, ipc", "GB/s", "min to max")
    for way in transfers:
        table.add_row(way.name, *_rate(way.gb_s))
    return table


def _server(server: ServerAtRest) -> Table:
    memory = server.memory
    table = _table("a server at rest", "", "reach")
    table.add_row("memory besides the arena", f"{memory.besides_shared / 1e6:.1f} MB", "80 MB")
    table.add_row("of it private, file-backed", f"{memory.anon / 1e6:.1f} MB, {memory.file / 1e6:.1f} MB", "")
    table.add_row("start to first answer", f"{server.start_s.median:.2f} s ({_range(server.start_s)})", "0.3 s")
    table.add_row("processor", f"{server.idle_cores:.2%} of a core", "0.5 %")
    table.add_row("torch", "loaded" if server.torch_loaded else "not loaded", "not loaded")
    return table


def _requests(requests: list[RequestFigures]) -> Table:
    table = _table("request", "bytes", "p50", "p99", "echo p50", "echo p99", "p50 to echo", "min to max", "reach")
    for row in requests:
        table.add_row(
            row.name, str(row.request_bytes), *_latency(row.latency), *_latency(row.echo),
            f"{row.ratio.median:.1f} x", _range(row.ratio), f"{row.reach:g} x" if row.reach else "",
        )  # fmt: skip
    return table


def _hashing(hashing: list[HashFigures]) -> Table:
    table = _table(
        "hashing, once a request", "hasher", "p50", "p99", "packed p50", "to one bare pass", "packed", "reach"
    )
    for row in hashing:
        compared = [f"{each.median:.1f} x" if each else "-" for each in (row.ratio, row.packed_ratio)]
        p50, p99 = _latency(row.latency)
        table.add_row(
            f"{row.tokens // 1024}k tokens", row.hasher, p50, p99, _time(row.packed.p50_us), *compared, "1.2 x"
        )
    return table


def _store(figures: StoreFigures) -> Table:
    wire = figures.path == "wire"
    headers = ["GB/s", "min to max", "first", "of `copy`", "min to max", *(["of bare ZMQ"] if wire else []), "reach"]
    table = _table(f"{figures.path} path, {figures.blocks} blocks", *headers)
    for shape in figures.shapes:
        copy = shape.copy
        table.add_row(f"{shape.shape}, `copy` ({copy.name})", *_rate(copy.gb_s))
        _add_transfers(table, shape, wire=wire)
    return table


def _add_transfers(table: Table, shape: ShapeFigures, *, wire: bool) -> None:
    for name, figures in (("store", shape.store), ("retrieve", shape.retrieve)):
        bare = figures.of_bare_transfer
        table.add_row(
            f"{shape.shape}, {name} ({ByteSize(shape.nbytes)})", *_rate(figures.gb_s), f"{figures.first_gb_s:.2f}",
            f"{figures.of_copy.median:.2f} x", _range(figures.of_copy),
            *([f"{bare.median:.2f} x" if bare else "-"] if wire else []),
            "0.8 x of bare ZMQ" if wire else f"{shape.reach:g} x",
        )  # fmt: skip


def _table(*headers: str) -> Table:
    table = Table(pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left", no_wrap=True)
    return table


def _rate(gb_s: Spread) -> tuple[str, str]:
    return f"{gb_s.median:.2f}", _range(gb_s)


def _range(spread: Spread) -> str:
    return f"{spread.min:.2f} to {spread.max:.2f}"


def _latency(latency: Latency) -> tuple[str, str]:
    return _time(latency.p50_us), _time(latency.p99_us)


def _time(us: float) -> str:
    return f"{us:.0f} µs" if us < 1000 else f"{us / 1000:.2f} ms"
