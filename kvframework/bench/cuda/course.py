"""Owns the course of `kvframework bench cuda`: the GPU, then its parts one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from kvframework.bench.attempt import NotMeasured, attempt
from kvframework.bench.child import scratch
from kvframework.bench.cuda.beside import bench_matmul
from kvframework.bench.cuda.device import Device
from kvframework.bench.cuda.document import CudaFigures
from kvframework.bench.cuda.instance import TRANSPORT
from kvframework.bench.cuda.moving import bench_transfers
from kvframework.bench.cuda.sizes import FULL, Sizes
from kvframework.bench.cuda.submits import bench_submits
from kvframework.bench.cuda.sweep import bench_sweep
from kvframework.bench.errors import BenchUnavailable
from kvframework.bench.l2.tier import check_plugin
from kvframework.bench.progress import Stage, no_progress
from kvframework.registry import PluginRegistry

PARTS = ("transfers", "submits", "matmul")
SWEEP = "sweep"

T = TypeVar("T")


def bench_cuda(sizes: Sizes = FULL, *, parts: Collection[str] = PARTS, stage: Stage = no_progress) -> CudaFigures:
    """Takes some minutes. For the main thread, whose current CUDA context it sets. Raises `BenchUnavailable` without a
    GPU, its driver or the transport, `BenchFailed`, and `WrongBytes` if a single byte that came back is wrong."""
    if not sizes.shapes:
        raise BenchUnavailable("no shape is left to be measured", where="bench cuda")
    not_measured: list[NotMeasured] = []
    with Device() as device:
        check_plugin(PluginRegistry(), "transport", TRANSPORT)

        def part(name: str, make: Callable[[Sizes, Device, Path, list[NotMeasured], Stage], T]) -> T | None:
            if name not in parts:
                return None
            with scratch() as directory:
                return attempt(not_measured, name, lambda: make(sizes, device, directory, not_measured, stage))

        transfers = part("transfers", bench_transfers)
        submits = part("submits", bench_submits)
        matmul = part("matmul", bench_matmul)
        sweep = part(SWEEP, bench_sweep)
        return CudaFigures(
            gpu=device.describe(),
            verified=bool(transfers or sweep),
            transfers=transfers or [],
            submits=submits or [],
            matmul=matmul,
            sweep=sweep,
            # Parts that have a step in common each leave it out.
            not_measured=list(dict.fromkeys(not_measured)),
        )
