"""The bench of an engine next to others: a disturbance really happens and always ends, and a hit's cost is
separated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.tests.processor_time import spin
from benchmarks.tests.test_commands import ENVIRON, SPREAD, children, document, stopped
from benchmarks.tests.test_plot import contention
from kvframework_bench.contention.sizes import FULL, QUICK
from kvframework_bench.document import Document
from kvframework_bench.errors import BenchFailed, Skipped, WrongBytes
from kvframework_bench.machine import Load, describe_machine
from kvframework_bench.process import scratch
from kvframework_bench.tables import tables
from kvframework_bench.workload import SHAPES
from tests.support.waiting import wait_until

TINY = msgspec.structs.replace(SHAPES["1kb"].quick(), tokens=256)


needs_torch = pytest.mark.torch


@pytest.fixture
def _engine() -> None:
    pytest.importorskip("torch")


@pytest.fixture
def _kernel(_engine: None) -> None:
    from kvf_cpu_gather.kernel import load_kernel

    if load_kernel() is None:
        pytest.skip("the copy kernel was not built: no C compiler at build time")


def tiny(**changes: Any) -> Any:
    return msgspec.structs.replace(
        QUICK, shapes=(TINY,), storing=TINY, hits=((TINY, 3),), lookup_calls=3, profiled=3, **changes
    )


@needs_torch
@pytest.mark.usefixtures("_kernel")
def test_the_command_measures_all_parts() -> None:
    figures = document("contention")
    assert figures["skipped"] == []
    (shape,) = figures["spinning"]
    assert shape["verified"] is True
    assert shape["spinners"] == max(len(os.sched_getaffinity(0)) - 1, 1)
    assert [row["operation"] for row in shape["transfers"]] == ["store", "retrieve"]
    assert all(set(row["ratio_to_copy"]) == set(row["ratio_to_quiet"]) == SPREAD for row in shape["transfers"])
    assert shape["transfers"][0]["target_ratio"] == SHAPES["1kb"].target_ratio / 2
    storing = figures["storing"]
    assert storing["stores"]["min"] >= 1
    (row,) = storing["lookups"]
    assert row["quiet"]["samples"] == row["storing"]["samples"] == QUICK.lookup_rounds * QUICK.lookup_calls
    assert row["p99_ratio"] == row["storing"]["p99_us"] / row["quiet"]["p99_us"]
    (hit,) = figures["hit"]["rows"]
    assert hit["hits"] == 5
    assert 0 < hit["copy_us"]["median"] < hit["processor_us"]["median"]
    assert 0 < hit["asking_us"]["median"] <= hit["overhead_us"]["max"]
    assert len(figures["hit"]["hot_spots"]) == 8
    assert not any("timed_copy" in spot["function"] for spot in figures["hit"]["hot_spots"])


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [(["--part", "hit", "--part", "storing"], "hit storing FULL"), (["--quick"], "spinning storing hit QUICK")],
)
def test_the_command_asks_for_the_parts_that_are_named(arguments: list[str], asked: str) -> None:
    program = (
        "import sys\n"
        "from kvframework_bench.contention import figures, run, sizes\n"
        "def bench(of, parts, stage):\n"
        "    print(*parts, 'QUICK' if of is sizes.QUICK else 'FULL', file=sys.stderr)\n"
        "    return figures.ContentionFigures([], None, None, [])\n"
        "run.bench_contention = bench\n"
        "sys.argv[:1] = ['kvframework', 'bench', 'contention']\n"
        "from kvframework.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert asked in done.stderr.splitlines()


@needs_torch
@pytest.mark.usefixtures("_engine")
def test_parts_that_are_not_asked_for_are_not_measured() -> None:
    from kvframework_bench.contention.run import bench_contention

    figures = bench_contention(tiny(), parts=["storing"])
    assert figures.storing is not None
    assert (figures.spinning, figures.hit) == ([], None)


@needs_torch
@pytest.mark.usefixtures("_engine")
def test_an_interrupted_bench_leaves_no_spinner() -> None:
    program = (
        "import msgspec, signal\n"
        "from kvframework_bench.contention.run import bench_contention\n"
        "from kvframework_bench.contention.sizes import QUICK\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "endless = msgspec.structs.replace(QUICK.shapes[0], rounds=1_000_000)\n"
        "try:\n"
        "    bench_contention(msgspec.structs.replace(QUICK, shapes=(endless,)), parts=['spinning'])\n"
        "except KeyboardInterrupt:\n"
        "    raise SystemExit(130)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_until(lambda: any(stopped(pid) for pid in children(process.pid)), 60, "a stopped spinner")
        started = children(process.pid)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


@needs_torch
@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("first", [True, False], ids=["in the first", "in later ones"])
def test_wrong_bytes_beside_spinners_make_no_figures(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch as pytorch

    from kvframework_bench.contention.run import bench_contention
    from kvframework_bench.engine import Transfers

    honest, calls = Transfers.retrieve, []

    def corrupting(self: Transfers) -> float:
        seconds = honest(self)
        calls.append(seconds)
        if first is (len(calls) == 1):
            self.memory.kv["layers.1"].view(pytorch.uint8)[1, self.memory.target[3], 2, 0, 5] ^= 1
        return seconds

    monkeypatch.setattr(Transfers, "retrieve", corrupting)
    with pytest.raises(WrongBytes, match=r"1 retrieved bytes of layers\.1"):
        bench_contention(tiny(), parts=["spinning"])


@needs_torch
@pytest.mark.usefixtures("_engine")
def test_the_other_client_stores_between_begin_and_end_only_and_evicts() -> None:
    from kvframework_bench.contention.storing_client import Start, running_storing_client
    from kvframework_bench.server import running_server, status

    with (
        scratch() as directory,
        running_server(directory, 4 * TINY.nbytes) as server,
        server.client() as client,
        running_storing_client(directory, Start(server.endpoint, TINY, {}, warm_up=8)) as storing,
    ):

        def evictions() -> int:
            return int(status(client)["l1"]["evictions"])

        before = evictions()
        storing.begin()
        storing.begin()
        wait_until(lambda: evictions() > before + 2, what="stores without a command for each")
        storing.end()
        storing.end()
        (stored,) = storing.stored
        assert stored.stores >= 2
        after = evictions()
        spin(0.05)
        assert evictions() == after
        # An engine that loses its server stores nothing, and must not look fast.
        storing.begin()
        server.child.kill()
        with pytest.raises(BenchFailed, match="storing client"):
            storing.end()


@needs_torch
@pytest.mark.usefixtures("_engine")
def test_a_client_that_stores_does_not_outlive_the_bench() -> None:
    from kvframework_bench.contention.storing_client import Start, running_storing_client
    from kvframework_bench.server import running_server

    with (
        scratch() as directory,
        running_server(directory, 4 * TINY.nbytes) as server,
        running_storing_client(directory, Start(server.endpoint, TINY, {}, warm_up=1)) as storing,
    ):
        storing.begin()
        storing._child.stdin.close()
        assert storing._child._process.wait(60) == 0


@needs_torch
@pytest.mark.usefixtures("_engine")
def test_a_client_that_cannot_store_is_told() -> None:
    from kvframework_bench.contention.storing_client import Start, running_storing_client
    from kvframework_bench.server import running_server

    too_big = SHAPES["1kb"]
    with scratch() as directory, running_server(directory, too_big.nbytes // 2) as server, server.client():
        start = Start(server.endpoint, too_big, {}, warm_up=1)
        with (
            pytest.raises(BenchFailed, match=r"storing client failed: .*a store of 8 chunks"),
            running_storing_client(directory, start),
        ):
            pass


@needs_torch
@pytest.mark.usefixtures("_engine")
def test_a_client_that_stored_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvframework_bench.contention import storing_client
    from kvframework_bench.contention.run import bench_contention
    from kvframework_bench.contention.storing_client import Stored

    monkeypatch.setattr(storing_client.StoringClient, "receive", lambda _self: Stored())
    monkeypatch.setattr(storing_client.LineChannel, "send", lambda _self, _line: None)
    with pytest.raises(BenchFailed, match="has stored no object"):
        bench_contention(tiny(), parts=["storing"])


@needs_torch
@pytest.mark.usefixtures("_engine")
def test_stores_that_evict_nothing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvframework_bench.contention import storing
    from kvframework_bench.contention.run import bench_contention
    from kvframework_bench.contention.storing_client import Start

    monkeypatch.setattr(storing, "Start", lambda *args, **_: Start(*args, warm_up=0))
    monkeypatch.setattr(storing, "_ARENA_SLACK", 256 << 20)
    with pytest.raises(BenchFailed, match="evicted no object"):
        bench_contention(tiny(), parts=["storing"])


@needs_torch
@pytest.mark.usefixtures("_kernel")
def test_a_copy_that_costs_more_is_not_python_that_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five milliseconds more in the copy, then in the Python around it: each is seen where it is."""
    import kvf_cpu_gather.kernel as kernel
    from kvframework.client import WorkerAdapter
    from kvframework_bench.contention.run import bench_contention

    def cost() -> tuple[float, float, float]:
        (row,) = bench_contention(tiny(), parts=["hit"]).hit.rows  # type: ignore[union-attr]
        return row.copy_us.median, row.overhead_us.median, row.asking_us.median

    before = cost()
    retrieve = WorkerAdapter.submit_retrieve

    def slowed(copy: kernel.NativeCopy) -> kernel.NativeCopy:
        def slow_copy(*arguments: Any) -> int:
            spin(0.005)
            return copy(*arguments)

        return slow_copy

    with kernel.wrapping_copies(slowed):
        slow_copy = cost()
    assert slow_copy[0] > before[0] + 4500
    assert max(slow_copy[1], slow_copy[2]) < before[1] + 2500

    def slow_retrieve(*arguments: Any) -> Any:
        spin(0.005)
        return retrieve(*arguments)

    monkeypatch.setattr(WorkerAdapter, "submit_retrieve", slow_retrieve)
    slow_python = cost()
    assert slow_python[0] < before[0] + 2500
    assert min(slow_python[1], slow_python[2]) > 4500


@needs_torch
@pytest.mark.usefixtures("_kernel")
def test_a_hit_whose_copy_is_not_seen_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvframework_bench.contention.profile import CopyClock
    from kvframework_bench.contention.run import bench_contention

    monkeypatch.setattr(CopyClock, "around", lambda _self, copy: copy)
    with pytest.raises(BenchFailed, match="saw no copy of a hit"):
        bench_contention(tiny(), parts=["hit"])


@needs_torch
@pytest.mark.usefixtures("_kernel")
def test_a_miss_is_no_cheap_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvframework.client import LookupResult, SchedulerAdapter
    from kvframework_bench.contention.run import bench_contention

    monkeypatch.setattr(SchedulerAdapter, "lookup", lambda *_arguments: LookupResult(0))
    with pytest.raises(BenchFailed, match="a lookup found 0 tokens"):
        bench_contention(tiny(), parts=["hit"])


@needs_torch
@pytest.mark.usefixtures("_engine")
def test_without_the_kernel_a_hit_is_not_measured_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvf_cpu_gather.kernel as kernel
    from kvframework_bench.contention.run import bench_contention

    monkeypatch.setattr(kernel, "load_kernel", lambda _threads=0: None)
    figures = bench_contention(tiny(), parts=["hit"])
    assert figures.hit is None
    assert figures.skipped == [
        Skipped(
            "hit",
            "the install has no compiled copy kernel of transport cpu_gather",
            "install kvframework on a machine with a C compiler",
        )
    ]


def test_without_torch_every_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvframework_bench.contention.run import PARTS, bench_contention

    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    figures = bench_contention(QUICK)
    assert [(row.what, row.reason) for row in figures.skipped] == [
        (part, "not installed: torch, numpy") for part in PARTS
    ]


def test_every_part_has_its_table() -> None:
    figures = msgspec.structs.replace(contention(), skipped=[Skipped("hit", "no kernel", "install it")])
    made = tables(Document("contention", False, describe_machine(), Load.of(0.0, 0.0, 0.0), figures))
    assert [table.row_count for table in made] == [2, 2, 1, 1, 1]
    headers = [[str(column.header) for column in table.columns] for table in made]
    assert headers[0][0] == "Transfers beside 1 busy process"
    assert [each[-1] for each in headers[1:3]] == ["Target", "Of which LOOKUP"]
    cells = [[list(column.cells) for column in table.columns] for table in made]
    assert [row[1] for row in cells[0]][-5:] == ["0.20 x", "0.10 to 0.40", "1.00 x", "0.15 x", ""]
    assert [row[0] for row in cells[1]] == [
        "1k tokens, hit",
        "100 µs",
        "400 µs",
        "100 µs",
        "400 µs",
        "1.00 x",
        "0.50 to 2.00",
        "1.00 x",
        "5 x",
    ]
    assert [row[0] for row in cells[4]] == ["hit", "no kernel", "install it"]


def test_the_sizes_are_those_of_the_budgets() -> None:
    assert {shape.name for shape in FULL.shapes} == set(SHAPES)
    assert FULL.lookup_tokens == (1024, 32768)
    assert {(shape.name, shape.tokens) for shape, _ in FULL.hits} == {("1kb", 2048), ("llama-3-8b", 2048)}
    assert FULL.storing == SHAPES["llama-3-8b"]


def test_a_storing_process_without_commands_ends() -> None:
    command = [sys.executable, "-m", "kvframework_bench.contention.storing_client"]
    done = subprocess.run(command, input=b"", capture_output=True, timeout=240, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
