"""The outside bench: what a tool's files say, which cells are kept, and whole runs at stand-ins for engine and tool."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvframework_bench.errors import BenchFailed, BenchUnavailable
from kvframework_bench.outside.aiperf import AIPerf
from kvframework_bench.outside.cells import Cell, rotated
from kvframework_bench.outside.figures import OutsideFigures, outside_tables, rows_of
from kvframework_bench.outside.lmcache_bench import LmcacheBench
from kvframework_bench.outside.load import FULL, OutsideSizes, trace_lines, write_tokenizer
from kvframework_bench.outside.run import bench_outside, chosen_contenders
from kvframework_bench.outside.tools import Result, Target, Workload
from kvframework_bench.outside.vllm_bench import VllmBench
from kvframework_bench.serving.contenders import IDEAL, NONE, OURS, OWN, PEER, Contender, Offload
from kvframework_bench.serving.load import LoadShape, make_load

pytest.importorskip("h11")

from benchmarks.tests.test_serving import CHUNK, absent, contender, conversation, model, stand_in, write_trace

__all__ = ["model"]

SIZES = OutsideSizes(LoadShape(100, 0.2, window_s=100), 1, 0.1, engine_bytes=0, capacity_bytes=0)
STAND_IN = str(Path(__file__).with_name("stand_in_tool.py"))
RESULT = Result(10, 0, 20.0, 15.0, 40.0, 60.0, 100.0)


class StandIn:
    """A tool of two workloads that notes which it has run."""

    name, differs = "a tool", "it is none"

    def __init__(self, fault: str = "", *, installed: bool = True) -> None:
        self.ran: list[str] = []
        self._fault, self._installed = fault, installed

    def version(self) -> str:
        if not self._installed:
            raise BenchUnavailable("not installed: a tool", hint="install it")
        return "1.2"

    def environment(self, target: Target) -> Mapping[str, str]:
        return {}

    def workloads(self) -> Sequence[Workload]:
        return [Workload(name, self._command(name), read) for name in ("first", "other")]

    def _command(self, name: str) -> Callable[[Target], Sequence[str]]:
        def command(target: Target) -> Sequence[str]:
            self.ran.append(f"{target.seed} {name}")
            return [sys.executable, STAND_IN, target.url, str(target.folder), self._fault]

        return command


def read(folder: Path) -> Result:
    completed = json.loads((folder / "result.json").read_text())["completed"]
    return Result(completed, 1 - completed, 20.0, 15.0, 40.0, 60.0, 100.0)


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Callable[..., OutsideFigures]:
    def start(tool: StandIn, *contenders: Contender, rounds: int = 2, sizes: OutsideSizes = SIZES) -> OutsideFigures:
        return bench_outside(
            sizes,
            trace=write_trace(tmp_path),
            folder=tmp_path / "cells",
            tools=[tool],
            contenders=contenders,
            rounds=rounds,
            model=model,
            launch=stand_in,
        )

    return start


def test_each_round_runs_every_workload_against_every_contender(run: Callable[..., OutsideFigures]) -> None:
    tool = StandIn()
    figures = run(tool, contender(NONE), contender(IDEAL))
    assert tool.ran == ["0 first", "0 other"] * 2 + ["1 first", "1 other"] * 2
    assert [(row.workload, row.contender, row.rounds) for row in figures.rows] == [
        (workload, name, 2) for workload in ("first", "other") for name in (NONE, IDEAL)
    ]
    assert [row.first_mean and row.first_mean.median for row in figures.rows] == [1.0, None] * 2
    assert [cell.prompt_tokens for cell in figures.cells] == [100] * 8
    assert [cell.computed_tokens for cell in figures.cells] == [40] * 8
    assert figures.rows[0].hit.median == pytest.approx(0.6)
    assert (figures.tools[0].version, figures.skipped) == ("1.2", [])
    assert len(outside_tables(figures)) == 2


def test_a_run_goes_on_where_it_ended(run: Callable[..., OutsideFigures], tmp_path: Path) -> None:
    run(StandIn(), contender(NONE), rounds=1)
    cut = tmp_path / "cells" / "round-0" / "no-offload" / "a-tool" / "other" / "cell.json"
    cut.write_text(cut.read_text()[:40])
    tool = StandIn()
    figures = run(tool, contender(NONE), rounds=2)
    assert tool.ran == ["0 other", "1 first", "1 other"]
    assert len(figures.cells) == 4
    with pytest.raises(BenchUnavailable, match="of other sizes, another trace or another model"):
        run(StandIn(), contender(NONE), sizes=FULL)


@contextmanager
def without_server(_directory: Path, _capacity: int) -> Iterator[Offload]:
    raise BenchFailed("the server has ended")
    yield


def test_what_does_not_run_here_is_named(run: Callable[..., OutsideFigures]) -> None:
    served = Contender(OWN, without_server, needed=False)
    figures = run(StandIn(), contender(NONE), served, absent(PEER), contender(OURS, "dies", needed=False))
    assert [(each.what, each.reason) for each in figures.skipped] == [
        (OWN, "the server has ended"),
        (PEER, "not installed: it"),
        (OURS, "Exception: only supported on GPUs"),
    ]
    assert {row.contender for row in figures.rows} == {NONE}
    nothing = run(StandIn(installed=False), contender(NONE))
    assert [(each.what, each.reason) for each in nothing.skipped] == [("a tool", "not installed: a tool")]
    assert (nothing.rows, nothing.tools) == ([], [])


@pytest.mark.parametrize(
    ("fault", "said"),
    [("dies", "has left no result of no offload"), ("fails", "no request to no offload was answered, 1 failed")],
)
def test_a_tool_that_fails_is_the_error_and_no_cell(
    run: Callable[..., OutsideFigures], tmp_path: Path, fault: str, said: str
) -> None:
    with pytest.raises(BenchFailed, match=said) as caught:
        run(StandIn(fault), contender(NONE))
    assert ("ValueError: no such dataset" in str(caught.value)) is (fault == "dies")
    assert not list((tmp_path / "cells").rglob("cell.json"))


def test_an_unknown_contender_lists_all() -> None:
    with pytest.raises(BenchUnavailable, match="unknown contender 'others'") as caught:
        chosen_contenders(["others"])
    assert "kvframework, offloading" in str(caught.value)


def test_ratios_are_to_the_ideal_of_the_same_round() -> None:
    def cell(name: str, number: int, ms: float, computed: int) -> Cell:
        result = Result(10, 0, ms, ms, ms, ms, 100.0)
        return Cell("t", "1", "w", name, number, [], result, 1000, computed, 0.0)

    cells = [cell(IDEAL, 0, 10.0, 100), cell(IDEAL, 1, 20.0, 100), cell(OURS, 0, 11.0, 200), cell(OURS, 1, 24.0, 100)]
    ideal, ours = rows_of(cells, IDEAL)
    assert ideal.first_mean is None
    assert ours.first_mean is not None
    assert ours.computed is not None
    assert (ours.first_mean.min, ours.first_mean.max) == pytest.approx((1.1, 1.2))
    assert (ours.computed.min, ours.computed.max) == (1.0, 2.0)
    assert [rotated("abc", number) for number in (0, 1, 4)] == [["a", "b", "c"], ["b", "c", "a"], ["b", "c", "a"]]


# what tools read and write


def test_the_trace_of_the_tools_has_chunks_for_all_tokens() -> None:
    trace = [*conversation(0, [1100, 1300], [0, 10]), *conversation(1, [1100, 1800], [1, 20])]
    lines = [json.loads(line) for line in trace_lines(make_load(trace, CHUNK, LoadShape(4, 1, window_s=30)))]
    assert [line["input_length"] for line in lines] == [275, 275, 325, 450]
    assert all(
        (len(each["hash_ids"]) - 1) * 128 < each["input_length"] <= len(each["hash_ids"]) * 128 for each in lines
    )
    assert lines[0]["hash_ids"] == lines[2]["hash_ids"][: len(lines[0]["hash_ids"])]
    assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)


def test_each_character_is_a_token(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = list(range(3, 32000))
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False).ids == ids
    assert len(tokenizer.encode("hi hi\n").ids) == 6


FILES = {
    "profile_export_aiperf.json": {
        "time_to_first_token": {"unit": "ms", "avg": 20.0, "p50": 15.0, "p99": 40.0},
        "request_latency": {"avg": 60.0},
        "output_token_throughput": {"avg": 100.0},
        "request_count": {"avg": 10.0},
    },
    "bench_serve.json": {
        "completed": 10,
        "failed": 0,
        "mean_ttft_ms": 20.0,
        "median_ttft_ms": 15.0,
        "p99_ttft_ms": 40.0,
        "mean_e2el_ms": 60.0,
        "output_throughput": 100.0,
    },
    "bench_summary.json": {
        "results": {
            "successful_requests": 10,
            "failed_requests": 0,
            "mean_ttft_ms": 20.0,
            "p50_ttft_ms": 15.0,
            "p99_ttft_ms": 40.0,
            "mean_request_latency_ms": 60.0,
            "output_throughput": 100.0,
        }
    },
}


@pytest.mark.parametrize("tool", [AIPerf(Path("/opt/aiperf")), VllmBench(), LmcacheBench()], ids=lambda each: each.name)
def test_commands_and_results_of_the_tools(tool: AIPerf | VllmBench | LmcacheBench, tmp_path: Path) -> None:
    for name, document in FILES.items():
        (tmp_path / name).write_text(json.dumps(document))
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}\n{}\n")
    target = Target("http://127.0.0.1:80", "model", tmp_path, trace, 128, 3, tmp_path, FULL)
    for workload in tool.workloads():
        command = workload.command(target)
        assert {"http://127.0.0.1:80", "3", str(tmp_path)} <= set(command)
        assert workload.read(tmp_path) == RESULT
    assert tool.environment(target) == tool.environment(target)
    assert AIPerf(Path("/opt/aiperf")).environment(target)["PYTHONPATH"] == ""
    assert VllmBench().environment(target)["PYTHONHASHSEED"] == "4"


def test_a_tool_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BenchUnavailable, match="does not run"):
        AIPerf(tmp_path / "none").version()
