"""The part `decode`: what loads cost the steps of an engine that decodes.

A step reads all its weights once, as decoding does, between two events of the GPU; a run is many steps, and what counts
is the p99 of their times. Else it is as `matmul`: alone, and next to each kind of transfer. Imports torch when a loop
is made. For the thread that opened the device.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvframework_bench.console import Stage
from kvframework_bench.cuda.device import Device
from kvframework_bench.cuda.figures import StepFigures
from kvframework_bench.cuda.matmul import cuda_torch, slowdowns
from kvframework_bench.cuda.workload import Sizes
from kvframework_bench.errors import BenchUnavailable, Skipped
from kvframework_bench.rounds import percentile

_MATRICES = 4
# All of a run is in the stream's queue at once, and `start` must not wait for room in it.
_STEPS = 150


class StepLoop:
    """Steps that read `nbytes` of weights. A `Loop` whose `seconds` are the p99 of its steps'."""

    def __init__(self, nbytes: int) -> None:
        """Raises `BenchUnavailable` where torch is not installed, or cannot use the GPU, or finds too little memory."""
        self._torch = torch = cuda_torch()
        cuda: Any = torch.cuda
        side = math.isqrt(nbytes // _MATRICES // 2)
        self.nbytes = _MATRICES * side * side * 2
        try:
            self._weights = [torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(_MATRICES)]
        except cuda.OutOfMemoryError as error:
            raise BenchUnavailable(f"the GPU has no memory for the weights of a step: {error}") from error
        self._token, self._product = (torch.randn(side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self._stream = cuda.Stream()
        self._events = [cuda.Event(enable_timing=True) for _ in range(_STEPS + 1)]
        torch.cuda.synchronize()
        self.start()
        self.seconds()

    def start(self) -> None:
        with self._torch.cuda.stream(self._stream):
            self._events[0].record()
            for event in self._events[1:]:
                for weights in self._weights:
                    self._torch.mv(weights, self._token, out=self._product)
                event.record()

    def ended(self) -> bool:
        return bool(self._events[-1].query())

    def seconds(self) -> float:
        self._events[-1].synchronize()
        return percentile(sorted(a.elapsed_time(b) / 1e3 for a, b in pairwise(self._events)), 0.99)


def bench_steps(sizes: Sizes, device: Device, _directory: Path, skipped: list[Skipped], stage: Stage) -> StepFigures:
    """Measure the loop. Raises `BenchUnavailable` without a torch that can use the GPU, and `BenchFailed`."""
    loop = StepLoop(sizes.step_bytes)
    rows, quiet = slowdowns(sizes, device, loop, skipped, stage, what="decode")
    return StepFigures(loop.nbytes, sizes.shapes[0].name, sizes.matmul_chunks, quiet, rows)
