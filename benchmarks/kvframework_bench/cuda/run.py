"""The run of `kvframework bench cuda`: the GPU, then its parts one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage, no_progress
from kvframework_bench.cuda.decode import bench_steps
from kvframework_bench.cuda.device import Device
from kvframework_bench.cuda.figures import CudaFigures
from kvframework_bench.cuda.instance import TRANSPORT
from kvframework_bench.cuda.matmul import bench_matmul
from kvframework_bench.cuda.sweep import bench_sweep
from kvframework_bench.cuda.transfers import bench_submits, bench_transfers
from kvframework_bench.cuda.workload import FULL, Sizes
from kvframework_bench.errors import BenchUnavailable, Skipped, measure_or_skip
from kvframework_bench.l2.tier import check_plugin
from kvframework_bench.process import scratch

PARTS = ("transfers", "submits", "matmul", "decode")
SWEEP = "sweep"

T = TypeVar("T")


def bench_cuda(sizes: Sizes = FULL, *, parts: Collection[str] = PARTS, stage: Stage = no_progress) -> CudaFigures:
    """Run the parts; takes some minutes. For the main thread, whose current CUDA context it sets. Raises
    `BenchUnavailable` without a GPU, its driver or the transport, `BenchFailed`, and `WrongBytes` if a single retrieved
    byte is wrong."""
    if not sizes.shapes:
        raise BenchUnavailable("the options leave no shape to measure", where="bench cuda")
    skipped: list[Skipped] = []
    with Device() as device:
        check_plugin(PluginRegistry(), "transport", TRANSPORT)

        def part(name: str, make: Callable[[Sizes, Device, Path, list[Skipped], Stage], T]) -> T | None:
            if name not in parts:
                return None
            with scratch() as directory:
                return measure_or_skip(skipped, name, lambda: make(sizes, device, directory, skipped, stage))

        transfers = part("transfers", bench_transfers)
        submits = part("submits", bench_submits)
        matmul = part("matmul", bench_matmul)
        decode = part("decode", bench_steps)
        sweep = part(SWEEP, bench_sweep)
        return CudaFigures(
            gpu=device.describe(),
            verified=bool(transfers or sweep),
            transfers=transfers or [],
            submits=submits or [],
            matmul=matmul,
            sweep=sweep,
            # Parts that have a step in common each leave it out.
            skipped=list(dict.fromkeys(skipped)),
            decode=decode,
        )
