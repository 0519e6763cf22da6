"""The figures of `bench cuda`: the crossing of engines, the content of tables and pictures, and the error without a
GPU."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kvframework.api.installing import install_command
from kvframework_bench.cuda import decode
from kvframework_bench.cuda.device import Device, link_of
from kvframework_bench.cuda.figures import (
    CudaFigures,
    Gpu,
    MatmulFigures,
    MatmulRow,
    Moved,
    StepFigures,
    SubmitRow,
    SweepFigures,
    SweepRow,
    TransferRow,
)
from kvframework_bench.cuda.sweep import crossing
from kvframework_bench.cuda.transfers import moved
from kvframework_bench.document import Document
from kvframework_bench.errors import BenchUnavailable, Skipped
from kvframework_bench.machine import Load, describe_machine
from kvframework_bench.panels import Bars, Lines, panels
from kvframework_bench.rounds import Latency, Spread
from kvframework_bench.tables import headline, tables

ONE = Spread(0.5, 1.0, 2.0)


def swept(fragment_bytes: int, dma: float, kernel: float, operation: str = "store") -> SweepRow:
    rates = Spread.of([dma]), Spread.of([kernel])
    return SweepRow(operation, fragment_bytes, 1 << 20, *rates, ONE, ONE)


def figures(**changes: Any) -> CudaFigures:
    gpu = Gpu("NVIDIA H100 80GB HBM3", 80 << 30, 132, "9.0", "13.0", "", "13.5.0", "32.0 GT/s PCIe x16")
    share = Moved(ONE, ONE, Spread(0.8, 0.92, 0.95))
    rows = [
        TransferRow(engine, "deepseek-v3", 64, 73728, 4, 1 << 20, 20, share, share, share, 0.9)
        for engine in ("auto", "dma")
    ]
    submits = [SubmitRow("store", 1, 16, Latency(80.0, 180.0, 190.0, 200), 200.0)]
    matmul = MatmulFigures(8192, "deepseek-v3", 16, ONE, [MatmulRow("kernel", "store", Spread(1.0, 1.04, 1.1), ONE)])
    sweep = SweepFigures([swept(1024, 1.0, 2.0), swept(32768, 3.0, 2.0)], 32768)
    made: dict[str, Any] = {
        "transfers": rows,
        "submits": submits,
        "matmul": matmul,
        "decode": StepFigures(4 << 30, "deepseek-v3", 16, ONE, matmul.rows),
        "sweep": sweep,
        "skipped": [],
    } | changes
    return CudaFigures(gpu, True, **made)


# pure parts


def test_steps_are_measured_by_the_p99_of_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for torch: one step in fifty takes ten times as long."""
    clock = [0.0]

    class Event:
        at = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            clock[0] += 1.0 + 9.0 * (next(steps) % 50 == 0)
            self.at = clock[0]

        def query(self) -> bool:
            return self.at > 0

        def synchronize(self) -> None:
            return

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    steps, read = itertools.count(1), []
    cuda = SimpleNamespace(
        OutOfMemoryError=MemoryError,
        Stream=object,
        Event=Event,
        stream=lambda _stream: contextlib.nullcontext(),
        synchronize=lambda: None,
    )
    torch = SimpleNamespace(
        cuda=cuda,
        bfloat16=2,
        randn=lambda *shape, **_: shape,
        mv=lambda weights, _token, **_: read.append(2 * weights[0] * weights[1]),
    )
    monkeypatch.setattr(decode, "cuda_torch", lambda: torch)
    loop = decode.StepLoop(1 << 20)
    read.clear()
    loop.start()
    assert loop.ended()
    assert sum(read) == 150 * loop.nbytes
    assert 0.9 < loop.nbytes / (1 << 20) <= 1
    assert loop.seconds() == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("rows", "cross"),
    [
        ([(1, 1.0, 2.0), (2, 3.0, 2.0), (4, 4.0, 2.0)], 2),
        ([(1, 3.0, 2.0), (2, 1.0, 2.0), (4, 4.0, 2.0)], 4),
        ([(1, 2.0, 2.0), (2, 2.0, 2.0)], 1),
        ([(1, 1.0, 2.0), (2, 1.0, 2.0)], None),
    ],
)
def test_engines_cross_where_dma_is_as_fast_from_there_on(
    rows: list[tuple[int, float, float]], cross: int | None
) -> None:
    assert crossing([swept(*row) for row in rows]) == cross


def test_engines_cross_only_where_they_do_both_ways() -> None:
    rows = [swept(size, 3.0, 2.0) for size in (1, 2, 4)]
    rows += [swept(size, rate, 2.0, "retrieve") for size, rate in ((1, 1.0), (2, 1.0), (4, 2.0))]
    assert crossing(rows) == 4


def test_a_share_is_that_of_the_plain_copys_speed() -> None:
    found = moved(10**9, [[0.5], [1.0]], [[0.25], [0.9]])
    assert found.ratio_to_reference == Spread(0.5, 0.7, 0.9)
    assert (found.gb_s, found.reference_gb_s.max) == (Spread(1.0, 1.5, 2.0), 4.0)


def test_the_link_is_told_as_the_kernel_tells_it(tmp_path: Path) -> None:
    folder = tmp_path / "0000:6e:00.0"
    folder.mkdir()
    assert link_of("00000000:6E:00.0", tmp_path) == ""
    (folder / "current_link_speed").write_text("32.0 GT/s PCIe\n")
    (folder / "current_link_width").write_text("16\n")
    assert link_of("00000000:6E:00.0", tmp_path) == link_of("0000:6e:00.0", tmp_path) == "32.0 GT/s PCIe x16"
    (folder / "current_link_width").write_text("0\n")
    assert link_of("0000:6e:00.0", tmp_path) == ""


# tables and pictures


def document(of: CudaFigures) -> Document:
    return Document("cuda", False, describe_machine(), Load.of(0.0, 0.0, 0.0), of)


def shown(of: CudaFigures) -> str:
    console = Console(width=250)
    with console.capture() as captured:
        for table in tables(document(of), markdown=True):
            console.print(table)
    return captured.get()


def test_tables_name_the_gpu_and_what_was_reached() -> None:
    assert headline(document(figures())).startswith("NVIDIA H100 80GB HBM3; ")
    text = shown(figures(skipped=[Skipped("matmul", "torch 2 cannot use the GPU", "install another")]))
    for cell in (
        "NVIDIA H100 80GB HBM3",
        "32.0 GT/s PCIe x16",
        "unknown",
        "engine auto",
        "engine dma",
        "72.0 KiB",
        "4 (1.0 MiB)",
        "0.92 x",
        "0.80 to 0.95",
        "180 µs",
        "200 µs",
        "1.04 x",
        "stores, engine kernel",
        'kernel_below = "32.0 KiB"',
        "torch 2 cannot use the GPU",
    ):
        assert cell in text


def test_a_sweep_that_does_not_cross_says_so() -> None:
    text = shown(figures(sweep=SweepFigures([swept(1024, 1.0, 2.0)], None)))
    assert "the kernel is faster for every fragment size" in text
    assert "kernel_below" not in text


def test_what_was_not_measured_has_no_table() -> None:
    text = shown(figures(transfers=[], submits=[], matmul=None, decode=None, sweep=None))
    assert text.count("|--") == 1 + text.count("-|--")
    assert panels(figures(transfers=[], submits=[], matmul=None, decode=None, sweep=None)) == []


def test_pictures_show_shares_with_their_reach_and_the_sweep_as_lines() -> None:
    auto, dma, submits, matmul, steps, sweep = panels(figures())
    assert isinstance(auto, Bars)
    assert isinstance(sweep, Lines)
    assert [bar.target_ratio for bar in auto.bars] == [0.9] * 3
    assert [bar.value for bar in auto.bars] == [0.92] * 3
    assert all(isinstance(panel, Bars) for panel in (dma, submits, matmul, steps))
    (store_dma, store_kernel, *_) = sweep.lines
    assert (list(store_dma.xs), list(store_dma.ys), list(store_kernel.ys)) == ([1024, 32768], [1.0, 3.0], [2.0, 2.0])


# the command


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], "transfers submits matmul decode; 8 shapes; auto dma kernel; 20 rounds"),
        (["--sweep"], "sweep; 8 shapes; auto dma kernel; 20 rounds"),
        (["--quick", "--part", "submits"], "submits; 4 shapes; auto dma kernel; 2 rounds"),
        (
            ["--shape", "deep", "--block", "64", "--engine", "dma", "--part", "transfers"],
            "transfers; 1 shapes; dma; 20 rounds",
        ),
    ],
)
def test_the_command_asks_for_what_it_is_told(arguments: list[str], asked: str) -> None:
    program = (
        "import sys\n"
        "from kvframework_bench.cuda import run\n"
        "from kvframework_bench.errors import BenchUnavailable\n"
        "def bench(of, parts, stage):\n"
        '    raise BenchUnavailable(f\'{" ".join(parts)}; {len(of.shapes)} shapes; {" ".join(of.engines)}; \'\n'
        "        f'{of.rounds} rounds')\n"
        "run.bench_cuda = bench\n"
        "sys.argv[:1] = ['kvframework', 'bench', 'cuda']\n"
        "from kvframework.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert f"[bench.unavailable] {asked}" in done.stderr


# without a GPU


def test_without_bindings_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BenchUnavailable, match="not installed: cuda-bindings") as refused:
        Device()
    assert refused.value.hint == install_command("cuda13", distribution="kvframework-cuda")


def test_without_a_gpu_the_command_says_so_and_measures_nothing() -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings are not installed")
    command = [sys.executable, "-m", "kvframework.cli.main", "bench", "cuda", "--quick"]
    # Where there is one, it is hidden.
    done = subprocess.run(
        ["env", "CUDA_VISIBLE_DEVICES=", "KVF_SIMULATED_CUDA=", *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2
    assert "[bench.unavailable] no GPU can be used here: cu" in done.stderr
    assert "hint: run nvidia-smi" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_nothing_left_to_measure_is_an_error() -> None:
    from kvframework_bench.cuda.run import bench_cuda
    from kvframework_bench.cuda.workload import FULL

    with pytest.raises(BenchUnavailable, match="leave no shape"):
        bench_cuda(FULL.only(shapes=["gpt-2"], blocks=[], engines=[]))
