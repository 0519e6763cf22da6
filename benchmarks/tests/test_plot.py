"""Pictures of figures: their content, and the errors before any measurement."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import kvframework_bench.decode.figures as decoded
from kvframework.api.installing import install_command
from kvframework_bench.blend.figures import BlendFigures, WayRow
from kvframework_bench.contention.figures import (
    ContentionFigures,
    HitFigures,
    HitRow,
    HotSpot,
    SpinningShape,
    SpinningTransfers,
    StoringFigures,
    StoringLookup,
)
from kvframework_bench.decode.figures import DecodeFigures
from kvframework_bench.document import (
    Document,
    Echo,
    Figures,
    HostFigures,
    LookupFigures,
    RequestFigures,
    ServerAtRest,
    ShapeFigures,
    StoreFigures,
    Throughput,
    TransferFigures,
)
from kvframework_bench.errors import BenchUnavailable, Skipped
from kvframework_bench.l2.figures import (
    DiskFigures,
    DiskRow,
    EngineRow,
    L2Figures,
    MemoryRow,
    RedisFigures,
    RedisRow,
    StalledRow,
)
from kvframework_bench.machine import Load, describe_machine
from kvframework_bench.observe.figures import NONE, ObservedLookup, ObserveFigures, ServerMemory
from kvframework_bench.outside.cells import Cell
from kvframework_bench.outside.figures import OutsideFigures, ToolFigures
from kvframework_bench.outside.figures import rows_of as outside_rows
from kvframework_bench.outside.tools import Result
from kvframework_bench.panels import Bars, Lines, panels
from kvframework_bench.plot import check_plot, write_plot
from kvframework_bench.rounds import Latency, Spread
from kvframework_bench.scale.figures import RatioToEcho, ScaleFigures, ScaleRow
from kvframework_bench.server import Resident
from kvframework_bench.serving.figures import LoadFigures, Replay, ServingFigures, rows_of
from kvframework_bench.shards.figures import TARGET, ShardsFigures, ShardsRow

ONE = Spread(0.5, 1.0, 2.0)
TIMES = Latency(100.0, 400.0, 500.0, 10)
DRAWS = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


def scale() -> ScaleFigures:
    def row(operation: str, clients: int, objects: int) -> ScaleRow:
        ratio_to_echo = None if operation == "echo" else RatioToEcho(ONE, ONE, 1.0)
        return ScaleRow(operation, clients, objects, TIMES, ONE, ONE, ONE, ONE, ONE, 1.0, ratio_to_echo)

    names = ("echo", "lookup")
    by_clients = [row(name, clients, 1024) for name in names for clients in (1, 8, 64)]
    by_objects = [row(name, 1, objects) for name in names for objects in (1024, 1 << 20)]
    return ScaleFigures(1, 32, 1024, 4096, 1200, by_clients, by_objects, [])


def host() -> HostFigures:
    server = ServerAtRest(Resident(1, 1, 1), torch_loaded=False, start_s=ONE, idle_cores=0.0)
    return HostFigures([Throughput("libc memmove, 1 thread", 1 << 20, ONE)], "", [Echo(64, TIMES)], [], server)


def lookup() -> LookupFigures:
    return LookupFigures([RequestFigures("LOOKUP 1k, hit", 1024, 257, TIMES, TIMES, ONE, 2.0)], [])


def store() -> StoreFigures:
    moved = TransferFigures(ONE, ONE, ONE)
    copy = Throughput("numpy", 1 << 20, ONE)
    return StoreFigures(
        "arena", "shuffled", [ShapeFigures("1kb", "", 1024, 1024, 1 << 20, 1, True, copy, moved, moved, 0.3)]
    )


def l2() -> L2Figures:
    return L2Figures(
        redis=RedisFigures("7", [RedisRow("put", 1 << 20, 1 << 20, "one", ONE, ONE, ONE, None, 0.9)]),
        s3=None,
        mooncake=[],
        engine=[EngineRow("redis", "1kb", 1 << 20, 1 << 20, True, "one", *8 * [ONE])],
        disk=DiskFigures("ext4", [DiskRow("read, cold", 1 << 20, 1 << 20, ONE, ONE, ONE, 0.0)]),
        stalled=[StalledRow(1024, TIMES, TIMES, ONE, "open", 1)],
        new=[],
        memory=[MemoryRow("none", "loaded", 1, 1, 1, 1 << 20, 1)],
        codecs=[],
        skipped=[],
    )


def contention() -> ContentionFigures:
    moved = SpinningTransfers("store", ONE, ONE, ONE, Spread(0.1, 0.2, 0.4), ONE, 0.15)
    spinning = SpinningShape("1kb", 1 << 20, 1, True, 1, ONE, "numpy", ONE, ONE, [moved])
    storing = StoringFigures("1kb", 1 << 20, ONE, ONE, [StoringLookup(1024, TIMES, TIMES, ONE, 1.0, 5.0)])
    row = HitRow("1kb", 1024, 1 << 20, 1, ONE, ONE, ONE, ONE, ONE, 300.0)
    return ContentionFigures([spinning], storing, HitFigures([row], "1kb", 1, [HotSpot("len", 1.0, 1.0, 1.0)]), [])


def observe() -> ObserveFigures:
    lookups = [ObservedLookup(state, "1k tokens, hit", TIMES, ONE, ONE) for state in (NONE, "all of it")]
    memory = [ServerMemory("with ghosts", 16, 512, Resident(1, 1, 1), Resident(1, 1, 1))]
    return ObserveFigures(1, 1, 0.2, 1, 1, lookups, memory)


def shards() -> ShardsFigures:
    rows = [ShardsRow(tp, 8 // tp, "tokens first (NHD)", ONE, ONE) for tp in (1, 2, 4, 8)]
    return ShardsFigures(8, 1024, 3, TARGET, rows)


def blend() -> BlendFigures:
    ways = [WayRow(way, 1.0, ONE, 1.0, 1.0, 1.0, 0.0, 0.0, 0.5) for way in ("full", "blend 15%")]
    return BlendFigures("smollm2", 50, 10, 1500, 16, ways, [])


def serving() -> ServingFigures:
    load = LoadFigures("conversations.jsonl", 60, 20, 25.0, 90000, 1000, 0.5, "a small Llama", 1 << 25, 1 << 30)
    replays = {
        (engines, name): [Replay([10.0, 20.0, 400.0], 40.0, 0.5, 300.0, connector_ms, 2.0, 1.0, [20.0])] * 3
        for engines in (1, 2)
        for name, connector_ms in (("no offload", None), ("kvframework", 8.0))
    }
    rows = rows_of(replays, "no offload", "ideal")
    return ServingFigures(load, rows, [Skipped("a peer", "Exception: no GPU", "it ends")])


def decode() -> DecodeFigures:
    windows = {name: [decoded.Window([0.01] * 9, [0.05], 4096)] * 3 for name in ("alone", "held", "loads")}
    return DecodeFigures("a small Llama", 4096, 1 << 27, 512, decoded.rows_of(windows, "alone", "held"))


def outside() -> OutsideFigures:
    result = Result(10, 0, 20.0, 15.0, 40.0, 60.0, 100.0)
    tools = [ToolFigures(name, "1.2", "less", 0.0) for name in ("aiperf", "vllm-bench")]
    cells = [
        Cell(tool.name, "1.2", "trace", name, 0, [], result, 1000, 400, 0.0)
        for tool in tools
        for name in ("ideal", "k")
    ]
    return OutsideFigures("t", "a Llama", 1 << 24, 1 << 30, tools, outside_rows(cells, "ideal"), cells, [])


FIGURES = {
    "scale": scale(),
    "host": host(),
    "lookup": lookup(),
    "store": store(),
    "l2": l2(),
    "contention": contention(),
    "observe": observe(),
    "shards": shards(),
    "blend": blend(),
    "serving": serving(),
    "decode": decode(),
    "outside": outside(),
}


def document(bench: str) -> Document:
    return Document(bench, False, describe_machine(), Load.of(0.0, 0.0, 0.0), FIGURES[bench])


@pytest.mark.parametrize("figures", FIGURES.values(), ids=FIGURES)
def test_every_bench_has_panels_with_units(figures: Figures) -> None:
    made = panels(figures)
    assert len(made) > 1
    for panel in made:
        assert panel.title
        assert (panel.x and panel.y and panel.lines) if isinstance(panel, Lines) else (panel.unit and panel.bars)


def test_scale_draws_throughput_against_clients() -> None:
    throughput = panels(scale())[0]
    assert isinstance(throughput, Lines)
    assert (throughput.x, throughput.y) == ("clients", "requests/s")
    assert [(line.name, list(line.xs), line.dashed) for line in throughput.lines] == [
        ("echo", [1, 8, 64], True),
        ("lookup", [1, 8, 64], False),
    ]
    assert [list(line.xs) for panel in panels(scale())[1:2] for line in panel.lines] == [[1024, 1 << 20]] * 2  # type: ignore[union-attr]


def test_a_bar_shows_what_it_is_meant_to_reach() -> None:
    shares = panels(store())[1]
    assert isinstance(shares, Bars)
    assert [(bar.name, bar.value, bar.low, bar.high, bar.target_ratio) for bar in shares.bars] == [
        ("1kb, store", 1.0, 0.5, 2.0, 0.3),
        ("1kb, retrieve", 1.0, 0.5, 2.0, 0.3),
    ]


def test_a_quiet_bar_lies_beside_the_disturbed_one_which_has_the_reach() -> None:
    shares, lookups, hits = panels(contention())
    assert isinstance(shares, Bars)
    assert isinstance(lookups, Bars)
    assert isinstance(hits, Bars)
    assert [(bar.name, bar.target_ratio, bar.kind) for bar in shares.bars] == [
        ("1kb, store, quiet", None, "reference"),
        ("1kb, store", 0.15, ""),
    ]
    assert [bar.kind for bar in lookups.bars] == ["reference", ""]
    assert [(bar.name, bar.target_ratio) for bar in hits.bars] == [("1kb", 300.0)]


@DRAWS
@pytest.mark.parametrize("bench", FIGURES)
def test_an_svg_says_what_was_measured_where(bench: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.svg"
    write_plot(document(bench), file)
    ET.parse(file)
    text = file.read_text()  # matplotlib draws text as paths, and names it in comments
    assert f"<!-- kvframework bench {bench}" in text
    assert describe_machine().cpu.split()[0] in text
    for panel in panels(FIGURES[bench]):
        assert f"<!-- {panel.title} -->" in text
        assert f"<!-- {panel.y if isinstance(panel, Lines) else panel.unit} -->" in text


@DRAWS
def test_a_png_has_a_picture(tmp_path: Path) -> None:
    from matplotlib.image import imread

    file = tmp_path / "figures.PNG"
    write_plot(document("scale"), file)
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(file, format="png")
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    assert pixels[..., :3].std() > 0.05  # not blank


@pytest.mark.parametrize("name", ["figures.jpg", "figures", "figures.pdf"])
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(BenchUnavailable, match=r"a plot cannot be written as") as refused:
        check_plot(tmp_path / name)
    assert refused.value.available == ".png, .svg"


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    for file in (tmp_path / "nowhere" / "figures.svg", tmp_path / "folder.svg"):
        with pytest.raises(BenchUnavailable, match="the plot file cannot be written"):
            check_plot(file)


def test_without_matplotlib_it_is_said_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    with pytest.raises(BenchUnavailable, match="matplotlib is not installed") as refused:
        check_plot(tmp_path / "figures.svg")
    assert refused.value.hint == install_command("plot", distribution="kvframework-bench")


@pytest.mark.parametrize("bench", ["host", "lookup", "store", "l2", "scale", "contention"])
def test_a_command_refuses_before_it_measures(bench: str) -> None:
    command = [sys.executable, "-m", "kvframework.cli.main", "bench", bench, "--plot", "figures.jpg"]
    # Each of them measures for longer than this.
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert "[bench.unavailable] --plot figures.jpg: a plot cannot be written as .jpg" in done.stderr
    assert done.stdout == ""
