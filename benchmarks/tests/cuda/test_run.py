"""A whole run, small, on the simulated driver: moved bytes are compared byte by byte, and the figures are complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.tests.cuda.run_program import TINY, Outcome
from kvframework_bench.cuda.figures import Moved
from kvframework_bench.rounds import Spread
from tests.cuda import building
from tests.cuda.node import CudaNode


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaNode]:
    with CudaNode(tmp_path_factory.mktemp("node") / "of", nbytes=4 << 30, max_delay_s=0.0002) as node:
        yield node
        assert node.violations() == []
        assert (node.mappings(), node.events()) == (0, 0)


def run(node: CudaNode, parts: str, *, bug: str = "", **changes: object) -> Outcome:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and NVRTC")
    environ = {**os.environ, **building.environment(node.path, kernels=True)}
    command = [sys.executable, "-m", "benchmarks.tests.cuda.run_program", parts, bug, json.dumps(changes)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=Outcome)


def is_whole(spread: Spread) -> bool:
    return 0 < spread.min <= spread.median <= spread.max


def test_every_shape_is_moved_by_every_engine(node: CudaNode) -> None:
    outcome = run(node, "transfers")
    figures = outcome.figures
    assert figures is not None
    assert figures.skipped == []
    assert figures.gpu.name.startswith("Simulated")
    assert figures.gpu.cuda == "13.0"
    found = [(row.engine, row.shape, row.block_tokens, row.chunks) for row in figures.transfers]
    assert found == [
        (engine, shape.name, shape.block_tokens, chunks)
        for engine in ("auto", "dma", "kernel")
        for shape in TINY.shapes
        for chunks in TINY.chunks
    ]
    for row in figures.transfers:
        assert row.rounds == TINY.rounds
        assert all(is_whole(spread) for of in kinds(row.store, row.retrieve, row.both) for spread in of)
    assert (figures.submits, figures.matmul, figures.sweep) == ([], None, None)
    assert outcome.leaked == 0


def kinds(*moved: Moved) -> list[tuple[Spread, ...]]:
    return [(each.gb_s, each.reference_gb_s, each.ratio_to_reference) for each in moved]


def test_submits_are_timed_and_torch_without_cuda_is_named(node: CudaNode) -> None:
    figures = run(node, "submits matmul decode").figures
    assert figures is not None
    assert [(row.operation, row.chunks, row.blocks) for row in figures.submits] == [
        (operation, chunks, 16 * chunks) for chunks in TINY.chunks for operation in ("store", "retrieve")
    ]
    assert all(row.latency.samples == TINY.submits for row in figures.submits)
    assert all(0 < row.latency.p50_us <= row.latency.p99_us for row in figures.submits)
    assert (figures.matmul, figures.decode) == (None, None)
    assert [named.what for named in figures.skipped] == ["matmul", "decode"]
    assert all("torch" in named.reason and named.hint for named in figures.skipped)


@pytest.mark.torch
def test_steps_that_decode_run_beside_transfers_of_every_engine(node: CudaNode) -> None:
    pytest.importorskip("torch")
    outcome = run(node, "decode", bug="host torch", step_bytes=1 << 15)
    assert outcome.figures is not None
    assert outcome.figures.skipped == []
    found = outcome.figures.decode
    assert found is not None
    assert (found.step_bytes, found.chunks) == (1 << 15, TINY.matmul_chunks)
    assert [(row.engine, row.operation) for row in found.rows] == [
        (engine, operation) for engine in ("plain", "auto", "dma", "kernel") for operation in ("store", "retrieve")
    ]
    assert is_whole(found.quiet_s)
    assert all(is_whole(row.slowdown) and is_whole(row.gb_s) for row in found.rows)
    assert outcome.leaked == 0


def test_the_loop_runs_beside_transfers_of_every_engine(node: CudaNode) -> None:
    outcome = run(node, "loop")
    assert outcome.loop_skipped == []
    ways = [(row.engine, row.operation) for row in outcome.loop]
    assert ways == [(e, operation) for e in ("plain", "auto", "dma", "kernel") for operation in ("store", "retrieve")]
    # The loop is over with the third transfer of each run.
    assert all(row.slowdown == Spread(3.0, 3.0, 3.0) and is_whole(row.gb_s) for row in outcome.loop)
    assert outcome.leaked == 0


def test_the_sweep_measures_each_size_both_ways_by_both_engines(node: CudaNode) -> None:
    outcome = run(node, "sweep")
    assert outcome.figures is not None
    sweep = outcome.figures.sweep
    assert sweep is not None
    assert [(row.fragment_bytes, row.operation, row.nbytes) for row in sweep.rows] == [
        (size, operation, TINY.sweep_bytes) for size in TINY.sweep_fragments for operation in ("store", "retrieve")
    ]
    for row in sweep.rows:
        assert all(is_whole(each) for each in (row.dma_gb_s, row.kernel_gb_s, row.dma_ratio, row.kernel_ratio))
    assert sweep.cross in (None, *TINY.sweep_fragments)
    assert outcome.leaked == 0


@pytest.mark.parametrize(
    ("parts", "bug", "error"),
    [
        ("transfers", "wrong bit", "WrongBytes: [bench.wrong_bytes]"),
        ("sweep", "wrong bit", "WrongBytes: [bench.wrong_bytes]"),
        ("transfers", "miss", "a retrieve of stored chunks is a miss"),
        ("submits", "drop", "a store of 1 chunks ended with StoreOutcome(stored=0, present=1"),
    ],
)
def test_what_went_wrong_makes_no_figures(node: CudaNode, parts: str, bug: str, error: str) -> None:
    # One step, so that only the comparison behind its rounds can tell.
    shape = msgspec.to_builtins(TINY.shapes[0])
    outcome = run(node, parts, bug=bug, engines=["dma"], shapes=[shape], chunks=[1], sweep_fragments=[1024])
    assert outcome.figures is None
    assert error in outcome.error


def test_steps_that_would_take_too_long_are_left_out(node: CudaNode) -> None:
    figures = run(node, "transfers", engines=["dma"], patience_s=0.0).figures
    assert figures is not None
    assert figures.transfers == []
    assert len(figures.skipped) == len(TINY.shapes) * len(TINY.chunks)
    named = figures.skipped[-1]
    assert named.what == "deepseek-v3, block 64, 2 chunks, engine dma"
    assert named.reason.startswith("a store would take about ")


def test_an_engine_that_cannot_copy_here_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    with CudaNode(tmp_path / "of", nbytes=4 << 30, driver_version=12060, max_delay_s=0.0002) as old:
        figures = run(old, "transfers", chunks=[1], engines=["dma", "kernel"]).figures
    assert figures is not None
    assert {row.engine for row in figures.transfers} == {"kernel"}
    (named,) = figures.skipped
    assert named.what == "engine dma"
    assert "no batched copies" in named.reason
    assert "12.8" in named.hint


def test_a_gpu_without_memory_has_steps_left_out(tmp_path: Path) -> None:
    """As far as the command, whose output names them."""
    with CudaNode(tmp_path / "of", nbytes=1 << 30) as node:
        environ = {**os.environ, **building.environment(node.path, kernels=True)}
        command = [
            sys.executable,
            "-m",
            "kvframework.cli.main",
            "bench",
            "cuda",
            "--quick",
            "--part",
            "transfers",
            "--markdown",
        ]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "Simulated" in done.stdout
    assert "GPU and host need" in done.stdout
    assert "engine" not in done.stdout


@pytest.mark.gpu
def test_the_command_measures_all_parts_on_a_gpu() -> None:
    command = [sys.executable, "-m", "kvframework.cli.main", "bench", "cuda", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode == 2 and "[bench.unavailable] no" in done.stderr:
        pytest.skip(f"there is no GPU here: {done.stderr.splitlines()[-2]}")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert figures["verified"] is True
    assert {row["engine"] for row in figures["transfers"]} == {"auto", "dma", "kernel"}
    assert figures["submits"]
    assert not [row for row in figures["skipped"] if row["what"] not in ("matmul", "decode")]
