"""The tables of a document, for a terminal or as Markdown."""

from __future__ import annotations

from rich import box
from rich.table import Table

from kvframework.api.plugin import ByteSize
from kvframework.text import short_number
from kvframework_bench.blend.figures import BlendFigures, blend_tables
from kvframework_bench.console import format_latency, format_range, format_rate, format_ratio, format_time, new_table
from kvframework_bench.contention.figures import ContentionFigures, contention_tables
from kvframework_bench.cuda.figures import CudaFigures, cuda_tables
from kvframework_bench.decode.figures import DecodeFigures, decode_tables
from kvframework_bench.disaggregated.figures import DisaggregatedFigures, disaggregated_tables
from kvframework_bench.document import (
    Document,
    HashFigures,
    HostFigures,
    LookupFigures,
    RequestFigures,
    RestartFigures,
    ServerAtRest,
    ShapeFigures,
    StoreFigures,
    Throughput,
)
from kvframework_bench.events.figures import EventsFigures, events_tables
from kvframework_bench.l2.figures import L2Figures, l2_tables
from kvframework_bench.machine import Machine
from kvframework_bench.node.figures import NodeFigures, node_tables
from kvframework_bench.observe.figures import ObserveFigures, observe_tables
from kvframework_bench.outside.figures import OutsideFigures, outside_tables
from kvframework_bench.policy.figures import PolicyFigures, policy_tables
from kvframework_bench.route.figures import RouteFigures, route_tables
from kvframework_bench.scale.figures import ScaleFigures, scale_tables
from kvframework_bench.serving.figures import ServingFigures, serving_tables
from kvframework_bench.shards.figures import ShardsFigures, shards_tables


def headline(document: Document) -> str:
    """Return the machine, its GPU if that was measured, and the versions, in one line."""
    gpu = f"{document.figures.gpu.name}; " if isinstance(document.figures, CudaFigures) else ""
    return gpu + machine_line(document.machine)


def machine_line(machine: Machine) -> str:
    """Return the machine in one line."""
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return (
        f"{machine.cpu}, {machine.cores} cores, {ByteSize(machine.memory_bytes)}, Linux {machine.kernel}; "
        f"Python {machine.python}, {packages}"
    )


def warning(document: Document) -> str:
    """Return the reason to doubt the figures; "" if there is none."""
    load, warnings = document.load, []
    if load.busy:
        warnings.append(
            f"the machine is busy: other processes used {load.others_before:.2f} of {load.cores} cores before and "
            f"{load.others_during:.2f} during the run (load average {load.loadavg_1min:.1f})"
        )
    if document.quick:
        warnings.append("a quick run: sizes and rounds are small")
    return "; ".join(warnings)


def tables(document: Document, *, markdown: bool = False) -> list[Table]:
    """Return the tables of one document."""
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
    elif isinstance(figures, ObserveFigures):
        made = observe_tables(figures)
    elif isinstance(figures, EventsFigures):
        made = events_tables(figures)
    elif isinstance(figures, RouteFigures):
        made = route_tables(figures)
    elif isinstance(figures, CudaFigures):
        made = cuda_tables(figures)
    elif isinstance(figures, RestartFigures):
        made = [_restart(figures)]
    elif isinstance(figures, ShardsFigures):
        made = shards_tables(figures)
    elif isinstance(figures, PolicyFigures):
        made = policy_tables(figures)
    elif isinstance(figures, BlendFigures):
        made = blend_tables(figures)
    elif isinstance(figures, NodeFigures):
        made = node_tables(figures)
    elif isinstance(figures, ServingFigures):
        made = serving_tables(figures)
    elif isinstance(figures, DecodeFigures):
        made = decode_tables(figures)
    elif isinstance(figures, DisaggregatedFigures):
        made = disaggregated_tables(figures)
    elif isinstance(figures, OutsideFigures):
        made = outside_tables(figures)
    else:
        made = [_store(figures)]
    for table in made:
        table.box = box.MARKDOWN if markdown else box.SIMPLE_HEAD
    return made


def _copies(figures: HostFigures) -> Table:
    table = new_table(f"memory copy of {ByteSize(figures.copies[0].nbytes)}", "GB/s", "min to max", "used as")
    for way in figures.copies:
        table.add_row(way.name, *format_rate(way.gb_s), "`copy`" if way.name == figures.copy else "")
    return table


def _echoes(figures: HostFigures) -> Table:
    table = new_table("bare ZMQ echo over ipc, message size", "p50", "p99")
    for echo in figures.echoes:
        table.add_row(str(ByteSize(echo.nbytes)), *format_latency(echo.latency))
    return table


def _transfers(transfers: list[Throughput]) -> Table:
    table = new_table(f"bare ZMQ transfer of {ByteSize(transfers[0].nbytes)}, ipc", "GB/s", "min to max")
    for way in transfers:
        table.add_row(way.name, *format_rate(way.gb_s))
    return table


def _server(server: ServerAtRest) -> Table:
    memory = server.memory
    table = new_table("idle server", "measured", "target")
    table.add_row("memory without the arena", f"{memory.excluding_shared / 1e6:.1f} MB", "80 MB")
    table.add_row("private memory, file-backed memory", f"{memory.anon / 1e6:.1f} MB, {memory.file / 1e6:.1f} MB", "")
    table.add_row("start to first answer", f"{server.start_s.median:.2f} s ({format_range(server.start_s)})", "0.3 s")
    table.add_row("processor", f"{server.idle_cores:.2%} of a core", "0.5 %")
    table.add_row("torch", "loaded" if server.torch_loaded else "not loaded", "not loaded")
    return table


def _restart(figures: RestartFigures) -> Table:
    title = f"time from kill -9 to the first hit, {figures.objects:,} objects of {ByteSize(figures.object_bytes)}"
    table = new_table(title, "p50", "p99", "min to max", "hit", "target")
    hit, read = figures.first_hit, figures.read_s
    table.add_row(
        f"kvframework hold, {hit.samples} kills",
        f"{hit.p50_us / 1e6:.2f} s",
        f"{hit.p99_us / 1e6:.2f} s",
        f"{format_range(figures.first_hit_s)} s",
        "yes",
        f"{short_number(figures.target_s)} s",
    )
    table.add_row("reading the journal and its objects", f"{read.median:.2f} s", "", f"{format_range(read)} s", "", "")
    for row in figures.memcached:
        name = f"memcached -e, {row.items:,} items, {row.end}"
        table.add_row(name, f"{row.answer_s:.2f} s", "", "", "yes" if row.hit else "no", "")
    return table


def _requests(requests: list[RequestFigures]) -> Table:
    table = new_table(
        "request", "bytes", "p50", "p99", "ZMQ echo p50", "ZMQ echo p99", "p50 ratio to echo", "min to max", "target"
    )
    for row in requests:
        table.add_row(
            row.name,
            str(row.request_bytes),
            *format_latency(row.latency),
            *format_latency(row.echo),
            f"{row.ratio.median:.1f} x",
            format_range(row.ratio),
            f"{short_number(row.target_ratio)} x" if row.target_ratio else "",
        )
    return table


def _hashing(hashing: list[HashFigures]) -> Table:
    table = new_table(
        "prompt, hashed once per request",
        "hasher",
        "p50",
        "p99",
        "p50 of packed tokens",
        "ratio to one bare hash",
        "ratio of packed tokens",
        "target",
    )
    for row in hashing:
        compared = [f"{each.median:.1f} x" if each else "-" for each in (row.ratio, row.packed_ratio)]
        p50, p99 = format_latency(row.latency)
        table.add_row(
            f"{row.tokens // 1024}k tokens", row.hasher, p50, p99, format_time(row.packed.p50_us), *compared, "1.5 x"
        )
    return table


def _store(figures: StoreFigures) -> Table:
    wire = figures.path == "wire"
    headers = [
        "GB/s",
        "min to max",
        "first pass, GB/s",
        "min to max",
        "ratio to `copy`",
        "min to max",
        *(["ratio to ZMQ"] if wire else []),
        "target",
    ]
    table = new_table(f"{figures.path}, {figures.blocks} blocks", *headers)
    for shape in figures.shapes:
        copy = shape.copy
        table.add_row(f"{shape.shape}, `copy` ({copy.name})", *format_rate(copy.gb_s))
        _add_transfers(table, shape, wire=wire)
    return table


def _add_transfers(table: Table, shape: ShapeFigures, *, wire: bool) -> None:
    for name, figures in (("store", shape.store), ("retrieve", shape.retrieve)):
        bare = figures.ratio_to_zmq
        table.add_row(
            f"{shape.shape}, {name} ({ByteSize(shape.nbytes)})",
            *format_rate(figures.gb_s),
            *format_rate(figures.first_gb_s),
            *format_ratio(figures.ratio_to_copy),
            *([f"{bare.median:.2f} x" if bare else "-"] if wire else []),
            "0.8 x of ZMQ" if wire else f"{short_number(shape.target_ratio)} x" if shape.target_ratio else "-",
        )
