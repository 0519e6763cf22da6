"""The part `matmul`: the cost of transfers for the GPU's other work, by each engine, and the cost of plain copies.

A loop of matrix products, timed by the GPU's own clock, plays the engine's work. In every round it runs once alone and
once next to each kind of transfer. Imports torch when a loop is made. For the thread that opened the device.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvframework_bench.console import Stage
from kvframework_bench.cuda.device import Device, plain_copies
from kvframework_bench.cuda.figures import MatmulFigures, MatmulRow
from kvframework_bench.cuda.instance import DeviceInstance, running_client
from kvframework_bench.cuda.memory import DeviceMemory
from kvframework_bench.cuda.workload import Sizes
from kvframework_bench.errors import BenchUnavailable, Skipped, measure_or_skip, require_torch
from kvframework_bench.process import scratch
from kvframework_bench.rounds import Case, Spread, interleave, rate_gb_s, ratio


class Loop(Protocol):
    """Work of the GPU that begins with `start` and ends by itself. One run at a time."""

    def start(self) -> None:
        """Start a run; never waits."""

    def ended(self) -> bool:
        """Return whether the run has ended; never waits."""

    def seconds(self) -> float:
        """Return what the run is measured by, in seconds by the GPU's clock. Waits until it has ended."""


def cuda_torch() -> Any:
    """Return torch. Raises `BenchUnavailable` where it is not installed, or cannot use the GPU."""
    require_torch()
    import torch

    if not torch.cuda.is_available():
        raise BenchUnavailable(
            f"torch {torch.__version__} cannot use the GPU", hint="install a torch that was built for CUDA"
        )
    return torch


class MatmulLoop:
    """Products of bfloat16 matrices of `size` x `size`, as many as take about `seconds` on a quiet GPU."""

    def __init__(self, size: int, seconds: float) -> None:
        """Raises `BenchUnavailable` where torch is not installed, or cannot use the GPU."""
        self._torch = torch = cuda_torch()
        cuda: Any = torch.cuda
        self._stream = cuda.Stream()
        self._begun, self._done = (cuda.Event(enable_timing=True) for _ in range(2))
        self._left, self._right, self._product = (
            torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        torch.cuda.synchronize()
        self._size = size
        self.products = 1
        for _ in range(3):
            self.start()
            one = self.seconds()
        self.products = max(round(seconds / max(one, 1e-6)), 1)

    @property
    def operations(self) -> int:
        """The floating-point operations of one run."""
        return 2 * self._size**3 * self.products

    def start(self) -> None:
        # Not on the current stream: a transfer without an event waits for the work in that.
        with self._torch.cuda.stream(self._stream):
            self._begun.record()
            for _ in range(self.products):
                self._torch.mm(self._left, self._right, out=self._product)
            self._done.record()

    def ended(self) -> bool:
        return bool(self._done.query())

    def seconds(self) -> float:
        self._done.synchronize()
        return float(self._begun.elapsed_time(self._done)) / 1e3


_QUIET = "quiet"


def bench_matmul(sizes: Sizes, device: Device, _directory: Path, skipped: list[Skipped], stage: Stage) -> MatmulFigures:
    """Measure the loop. Raises `BenchUnavailable` without a torch that can use the GPU, and `BenchFailed`."""
    loop = MatmulLoop(sizes.matmul_size, sizes.loop_s)
    shape, chunks = sizes.shapes[0], sizes.matmul_chunks
    rows, quiet = slowdowns(sizes, device, loop, skipped, stage)
    tflop_s = Spread(*(loop.operations / seconds / 1e12 for seconds in (quiet.max, quiet.median, quiet.min)))
    return MatmulFigures(sizes.matmul_size, shape.name, chunks, tflop_s, rows)


def slowdowns(
    sizes: Sizes, device: Device, loop: Loop, skipped: list[Skipped], stage: Stage, *, what: str = "matmul"
) -> tuple[list[MatmulRow], Spread]:
    """Return the slowdowns of `loop` next to stores and next to retrieves of each engine and of plain copies; and its
    quiet seconds."""
    shape, chunks = sizes.shapes[0], sizes.matmul_chunks
    nbytes = shape.nbytes(chunks)
    transfers: dict[tuple[str, str], _LoopAndTransfers] = {}
    with ExitStack() as stack:
        plain = stack.enter_context(plain_copies(device, nbytes))
        memory = stack.enter_context(DeviceMemory(device, shape, chunks))

        def by_server(engine: str) -> dict[str, Case]:
            client = stack.enter_context(running_client(stack.enter_context(scratch()), engine, nbytes))
            instance = stack.enter_context(DeviceInstance(client, memory, chunks))
            instance.store(chunks)
            instance.verify(chunks)
            return instance.cases(chunks)

        ways = {"plain": {"store": lambda: plain.store(nbytes), "retrieve": lambda: plain.retrieve(nbytes)}}
        for engine in sizes.engines:
            ways[engine] = measure_or_skip(skipped, f"{what}, engine {engine}", partial(by_server, engine)) or {}
        for engine, ways_of in ways.items():
            for operation, case in ways_of.items():
                transfers[engine, operation] = _LoopAndTransfers(loop, case)
        cases: dict[str, Case] = {_QUIET: lambda: _alone(loop)}
        cases |= {f"{engine} {operation}": each.run for (engine, operation), each in transfers.items()}
        with stage(f"{what}: a loop next to transfers", sizes.matmul_rounds) as advance:
            measured = interleave(cases, rounds=sizes.matmul_rounds, advance=advance)
    rows = [
        MatmulRow(
            engine=engine,
            operation=operation,
            slowdown=ratio(measured[f"{engine} {operation}"], measured[_QUIET]),
            gb_s=rate_gb_s(nbytes, [each.moved]),
        )
        for (engine, operation), each in transfers.items()
    ]
    return rows, Spread.of([seconds for samples in measured[_QUIET] for seconds in samples])


def _alone(loop: Loop) -> float:
    loop.start()
    return loop.seconds()


class _LoopAndTransfers:
    """The loop, with one transfer after the other until it has ended; `moved` has the seconds of all transfers."""

    def __init__(self, loop: Loop, transfer: Case) -> None:
        self.moved: list[float] = []
        self._loop = loop
        self._transfer = transfer

    def run(self) -> float:
        self._loop.start()
        while True:
            self.moved.append(self._transfer())
            if self._loop.ended():
                return self._loop.seconds()
