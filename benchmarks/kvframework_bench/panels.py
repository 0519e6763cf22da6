"""The pictures of each benchmark's figures, as data: lines and bars with their units. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvframework.api.plugin import ByteSize
from kvframework_bench.blend.figures import FULL, BlendFigures
from kvframework_bench.contention.figures import ContentionFigures
from kvframework_bench.cuda.figures import CudaFigures
from kvframework_bench.decode.figures import DecodeFigures
from kvframework_bench.disaggregated.figures import DisaggregatedFigures
from kvframework_bench.document import Figures, HostFigures, LookupFigures, RestartFigures, StoreFigures
from kvframework_bench.events.figures import EventsFigures
from kvframework_bench.l2.figures import L2Figures
from kvframework_bench.node.figures import NodeFigures
from kvframework_bench.observe.figures import NONE, ObservedLookup, ObserveFigures
from kvframework_bench.outside.figures import OutsideFigures
from kvframework_bench.policy.figures import PolicyFigures
from kvframework_bench.rounds import Latency, Spread
from kvframework_bench.route.figures import RouteFigures
from kvframework_bench.scale.figures import ScaleFigures, ScaleRow
from kvframework_bench.serving.figures import ServingFigures
from kvframework_bench.shards.figures import ShardsFigures


@dataclass(frozen=True)
class Line:
    """`ys` over `xs`; `dashed` for references and for tails, `like` another line's colour."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dashed: bool = False
    like: str = ""


@dataclass(frozen=True)
class Lines:
    """A chart of lines; both axes are logarithmic."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class Bar:
    """One bar. `low` to `high` is its range; `target_ratio` the target, None for none. Bars of a `kind` look alike."""

    name: str
    value: float
    low: float
    high: float
    target_ratio: float | None = None
    kind: str = ""


@dataclass(frozen=True)
class Bars:
    """A chart of horizontal bars, from the top; the axis begins at 0 unless it is logarithmic."""

    title: str
    unit: str
    bars: Sequence[Bar]
    log: bool = False


Panel = Lines | Bars


def panels(figures: Figures) -> list[Panel]:
    """Return the panels of one document; [] if it has no figures at all."""
    if isinstance(figures, ScaleFigures):
        both = zip(_scale(figures.by_clients, clients=True), _scale(figures.by_objects, clients=False), strict=True)
        return [panel for pair in both for panel in pair]
    if isinstance(figures, HostFigures):
        return _host(figures)
    if isinstance(figures, LookupFigures):
        return _lookup(figures)
    if isinstance(figures, StoreFigures):
        return _store(figures)
    if isinstance(figures, ContentionFigures):
        return _contention(figures)
    if isinstance(figures, ObserveFigures):
        return _observe(figures.lookups)
    if isinstance(figures, EventsFigures):
        costs = [spread_bar(cost.name, cost.us) for cost in figures.costs]
        return [Bars("CPU time per chunk", "µs", costs), *_observe(figures.lookups)]
    if isinstance(figures, RouteFigures):
        return [_route(figures)]
    if isinstance(figures, CudaFigures):
        return _cuda(figures)
    if isinstance(figures, RestartFigures):
        rows = [("kill -9 to the first hit", figures.first_hit_s), ("reading the journal", figures.read_s)]
        return [Bars("restart", "s", [spread_bar(name, seconds) for name, seconds in rows])]
    if isinstance(figures, ShardsFigures):
        return _shards(figures)
    if isinstance(figures, PolicyFigures):
        bars = [spread_bar(f"{row.policy}, {row.objects}", row.us, row.target_us) for row in figures.rows]
        return [Bars("CPU time per block", "µs", bars)]
    if isinstance(figures, BlendFigures):
        return _blend(figures)
    if isinstance(figures, NodeFigures):
        return [
            Bars("server's CPU time per request", "µs", [spread_bar(row.way, row.server_us) for row in figures.rows])
        ]
    if isinstance(figures, ServingFigures):
        return _serving(figures)
    if isinstance(figures, DecodeFigures):
        ratios = [spread_bar(row.beside, row.p99, 1.5) for row in figures.rows if row.p99 is not None]
        return [
            Bars("time between tokens, p99", "ms", [spread_bar(row.beside, row.p99_ms) for row in figures.rows]),
            Bars("time between tokens, p99, ratio to alone", "x", ratios),
        ]
    if isinstance(figures, DisaggregatedFigures):
        return [
            Bars(
                f"time to the first token, {tokens} tokens",
                "ms",
                [
                    spread_bar(f"{row.at_once} at once, {row.way}", row.first_ms)
                    for row in figures.rows
                    if row.prompt_tokens == tokens
                ],
            )
            for tokens in sorted({row.prompt_tokens for row in figures.rows})
        ]
    if isinstance(figures, OutsideFigures):
        return [
            Bars(
                f"{tool.name}, first token, mean",
                "ms",
                [
                    spread_bar(f"{row.workload}, {row.contender}", row.first_mean_ms)
                    for row in figures.rows
                    if row.tool == tool.name
                ],
            )
            for tool in figures.tools
        ]
    return _l2(figures)


def _shards(figures: ShardsFigures) -> list[Panel]:
    made: list[Panel] = []
    for word, spreads in (("store", [row.store for row in figures.rows]), ("load", [row.load for row in figures.rows])):
        names = [f"TP {row.tp}, {row.layout}" for row in figures.rows]
        shares = [spread_bar(*each, figures.target_ratio) for each in zip(names, spreads, strict=True)]
        made.append(Bars(f"{word} with shards, ratio to without", "x", shares))
    return made


def _serving(figures: ServingFigures) -> list[Panel]:
    def bars(title: str, unit: str, values: Sequence[Spread | None]) -> Bars:
        made = [
            spread_bar(
                f"{row.contender}, {row.engines}",
                value,
                kind="reference" if row.p50 is None else row.contender,
            )
            for row, value in zip(figures.rows, values, strict=True)
            if value is not None
        ]
        return Bars(title, unit, made)

    rows = figures.rows
    hits = [Spread(100 * row.hit.min, 100 * row.hit.median, 100 * row.hit.max) for row in rows]
    made = [
        bars("time to first token, p50; 1 or 2 engines", "ms", [row.p50_ms for row in rows]),
        bars("time to first token, p90", "ms", [row.p90_ms for row in rows]),
        bars("time to first token, p99", "ms", [row.p99_ms for row in rows]),
        bars("hit rate, prompt tokens", "%", hits),
        bars("output tokens per second", "tokens/s", [row.tokens_s for row in rows]),
        bars("engine's CPU time per request", "ms", [row.engine_ms for row in rows]),
        bars("connector's CPU time per request", "ms", [row.connector_ms for row in rows]),
        bars(
            "server's CPU time per request",
            "ms",
            [row.server_ms if row.server_ms.max else None for row in rows],
        ),
    ]
    return [panel for panel in made if panel.bars]


def _blend(figures: BlendFigures) -> list[Panel]:
    def kind(way: str) -> str:
        return "reference" if way == FULL else way.partition(" ")[0].replace("blend", "")

    def bars(values: Sequence[tuple[str, float]]) -> list[Bar]:
        return [Bar(name, value, value, value, kind=kind(name)) for name, value in values]

    others = [row for row in figures.ways if row.way != FULL]
    prefills = [spread_bar(row.way, row.prefill_s, kind=kind(row.way)) for row in figures.ways]
    return [
        Bars("prefill of the documents", "CPU s", prefills),
        Bars("tokens equal to full prefill", "%", bars([(row.way, 100 * row.agreement) for row in others])),
        Bars("KL divergence from full prefill", "nats", bars([(row.way, row.divergence) for row in others])),
        Bars("right answers", "%", bars([(row.way, 100 * row.right) for row in figures.ways])),
    ]


def _scale(rows: Sequence[ScaleRow], *, clients: bool) -> list[Panel]:
    x, grow = ("clients", "clients") if clients else ("objects in L1", "objects")
    operations = list(dict.fromkeys(row.operation for row in rows))

    def lines(name: str, y: str, values: Sequence[tuple[str, Sequence[float]]]) -> Lines:
        made = []
        for word, all_values in values:
            for operation in operations:
                at = [index for index, row in enumerate(rows) if row.operation == operation]
                xs = [float(rows[index].clients if clients else rows[index].objects) for index in at]
                label = f"{operation}{word}"
                dashed = word == " p99" or (operation == "echo" and not word)
                made.append(Line(label, xs, [all_values[index] for index in at], dashed, operation))
        return Lines(f"{name}, more {grow}", x, y, made)

    return [
        lines("throughput", "requests/s", [("", [row.requests_s.median for row in rows])]),
        lines(
            "latency",
            "µs",
            [(" p50", [row.latency.p50_us for row in rows]), (" p99", [row.latency.p99_us for row in rows])],
        ),
        lines("the server's CPU time", "µs per request", [("", [row.server_us.median for row in rows])]),
    ]


def _host(figures: HostFigures) -> list[Panel]:
    sizes = [float(echo.nbytes) for echo in figures.echoes]
    return [
        Bars(
            f"copy of {ByteSize(figures.copies[0].nbytes)}",
            "GB/s",
            [spread_bar(way.name, way.gb_s) for way in figures.copies],
        ),
        Lines(
            "bare ZMQ echo",
            "bytes",
            "µs",
            [
                Line("p50", sizes, [echo.latency.p50_us for echo in figures.echoes]),
                Line("p99", sizes, [echo.latency.p99_us for echo in figures.echoes], dashed=True, like="p50"),
            ],
        ),
    ]


def _lookup(figures: LookupFigures) -> list[Panel]:
    bars = []
    for row in figures.requests:
        bars.append(latency_bar(row.name, row.latency))
        bars.append(latency_bar(f"echo of {row.request_bytes} B", row.echo, "reference"))
    ratios = [spread_bar(row.name, row.ratio, row.target_ratio or None) for row in figures.requests]
    return [Bars("p50, up to p99", "µs", bars, log=True), Bars("p50, ratio to the echo", "x", ratios)]


def _store(figures: StoreFigures) -> list[Panel]:
    rates: list[Bar] = []
    shares: list[Bar] = []
    for shape in figures.shapes:
        rates.append(spread_bar(f"{shape.shape}, copy", shape.copy.gb_s, kind="reference"))
        for word, own in (("store", shape.store), ("retrieve", shape.retrieve)):
            rates.append(spread_bar(f"{shape.shape}, {word}", own.gb_s))
            target_ratio = shape.target_ratio if figures.path == "arena" else None
            shares.append(spread_bar(f"{shape.shape}, {word}", own.ratio_to_copy, target_ratio))
    return [
        Bars(f"{figures.path} path, {figures.blocks} blocks", "GB/s", rates),
        Bars("ratio to the fastest plain copy", "x", shares),
    ]


def _l2(figures: L2Figures) -> list[Panel]:
    made: list[Panel] = []
    shares: list[Bar] = []
    if figures.redis is not None:
        shares += [
            spread_bar(f"Redis, {ByteSize(r.value_bytes)} {r.operation}", r.ratio_to_reference, r.target_ratio)
            for r in figures.redis.rows
        ]
    shares += [spread_bar(f"Redis to engine, {row.shape}", row.ratio_to_reference) for row in figures.engine]
    if figures.disk is not None:
        shares += [
            spread_bar(f"disk, {ByteSize(r.value_bytes)} {r.operation}", r.ratio_to_reference)
            for r in figures.disk.rows
        ]
    if shares:
        made.append(Bars("ratio to the bare client or plain files", "x", shares))
    if figures.stalled:
        bars = []
        for row in figures.stalled:
            bars.append(latency_bar(f"{row.tokens // 1024}k tokens, no L2", row.without_l2, "reference"))
            bars.append(latency_bar(f"{row.tokens // 1024}k tokens, stalled Redis", row.stalled))
        made.append(Bars("LOOKUP in L1, p50, up to p99", "µs", bars, log=True))
    if figures.memory:
        grown = [(f"{row.codec}, {row.direction}", row.growth_bytes / (1 << 20)) for row in figures.memory]
        made.append(
            Bars("growth of the server besides its arena", "MiB", [Bar(name, mib, mib, mib) for name, mib in grown])
        )
    if figures.codecs:
        rates = []
        for packer in figures.codecs:
            rates.append(spread_bar(f"{packer.codec}, to {packer.ratio:.3f}, packs", packer.pack_gb_s))
            rates.append(spread_bar(f"{packer.codec}, unpacks", packer.unpack_gb_s))
        made.append(Bars("codecs, on one core", "GB/s", rates))
    return made


def _contention(figures: ContentionFigures) -> list[Panel]:
    made: list[Panel] = []
    if figures.spinning:
        shares = []
        for shape in figures.spinning:
            for row in shape.transfers:
                name = f"{shape.shape}, {row.operation}"
                shares.append(spread_bar(f"{name}, quiet", row.quiet_ratio_to_copy, kind="reference"))
                shares.append(spread_bar(name, row.ratio_to_copy, row.target_ratio))
        made.append(Bars("ratio to a quiet copy, next to busy cores", "x", shares))
    if figures.storing is not None:
        bars = []
        for lookup in figures.storing.lookups:
            bars.append(latency_bar(f"{lookup.tokens // 1024}k tokens, quiet", lookup.quiet, "reference"))
            bars.append(latency_bar(f"{lookup.tokens // 1024}k tokens, next to stores", lookup.storing))
        made.append(Bars("LOOKUP in L1, p50, up to p99", "µs", bars, log=True))
    if figures.hit is not None:
        costs = [spread_bar(row.shape, row.overhead_us, row.target_us) for row in figures.hit.rows]
        made.append(Bars("the engine's CPU time for a hit, without the copy", "µs", costs))
    return made


def _route(figures: RouteFigures) -> Panel:
    bars = []
    for row in figures.scores:
        name = f"{row.tokens // 1024}k tokens, {row.having:,} of {row.nodes:,} nodes"
        for word, ms in (("whole", row.whole_ms), ("longest step", row.longest_step_ms)):
            bars.append(Bar(f"{name}, {word}", ms, ms, ms))
    return Bars("/score", "ms", bars, log=True)


def _observe(lookups: Sequence[ObservedLookup]) -> list[Panel]:
    rows = [row for row in lookups if row.state != NONE]
    return [
        Bars(
            "LOOKUP p50, ratio to a plain server",
            "x",
            [spread_bar(f"{row.lookup}, {row.state}", row.p50_ratio) for row in rows],
        ),
        Bars(
            "LOOKUP p99, ratio to a plain server",
            "x",
            [spread_bar(f"{row.lookup}, {row.state}", row.p99_ratio) for row in rows],
        ),
    ]


def _cuda(figures: CudaFigures) -> list[Panel]:
    made: list[Panel] = []
    for engine in dict.fromkeys(row.engine for row in figures.transfers):
        shares = []
        for row in figures.transfers:
            if row.engine == engine:
                for word, moved in (("store", row.store), ("retrieve", row.retrieve), ("both", row.both)):
                    name = f"{row.shape}, {row.block_tokens}, {row.chunks} chunks, {word}"
                    shares.append(spread_bar(name, moved.ratio_to_reference, row.target_ratio, word))
        made.append(Bars(f"ratio to one plain pinned copy, engine {engine}", "x", shares))
    if figures.submits:
        submits = [latency_bar(f"{row.operation}, {row.chunks} chunks", row.latency) for row in figures.submits]
        made.append(Bars("the engine thread's time for a submit, p50, up to p99", "µs", submits))
    if figures.matmul is not None:
        slower = [spread_bar(f"{row.operation}s, {row.engine}", row.slowdown) for row in figures.matmul.rows]
        made.append(Bars("time of matrix products next to transfers, ratio to no transfers", "x", slower))
    if figures.decode is not None:
        slower = [spread_bar(f"{row.operation}s, {row.engine}", row.slowdown, 1.5) for row in figures.decode.rows]
        made.append(Bars("p99 of steps that read all weights next to transfers, ratio to no transfers", "x", slower))
    if figures.sweep is not None:
        lines = []
        for operation in ("store", "retrieve"):
            rows = [row for row in figures.sweep.rows if row.operation == operation]
            sizes = [float(row.fragment_bytes) for row in rows]
            dashed = operation == "retrieve"
            for engine, rates in (("dma", [r.dma_gb_s for r in rows]), ("kernel", [r.kernel_gb_s for r in rows])):
                ys = [rate.median for rate in rates]
                lines.append(Line(f"{engine} {operation}", sizes, ys, dashed, like=f"{engine} store"))
        made.append(Lines("fragments, by copy engines and by the kernel", "bytes", "GB/s", lines))
    return made


def spread_bar(name: str, spread: Spread, target_ratio: float | None = None, kind: str = "") -> Bar:
    """Return the median, and the range of the rounds."""
    return Bar(name, spread.median, spread.min, spread.max, target_ratio, kind)


def latency_bar(name: str, latency: Latency, kind: str = "") -> Bar:
    """Return p50, and p99 as the upper end of its range."""
    return Bar(name, latency.p50_us, latency.p50_us, latency.p99_us, kind=kind)
