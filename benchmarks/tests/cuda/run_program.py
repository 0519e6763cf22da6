"""The run of `bench cuda`, small, on the GPU that this process sees: PARTS BUG CHANGES, the last being what
differs from `TINY`, as JSON.

Prints the figures, or the error, as one line of JSON. `loop` among the parts is `matmul` with a loop that
needs no torch.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec

import kvframework_bench.cuda.decode
from kvframework.api.futures import Future
from kvframework.api.transport import LoadOutcome, StoreOutcome
from kvframework.client import WorkerAdapter
from kvframework_bench.console import no_progress
from kvframework_bench.cuda.device import Device
from kvframework_bench.cuda.figures import CudaFigures, MatmulRow
from kvframework_bench.cuda.instance import DeviceInstance, Timing
from kvframework_bench.cuda.matmul import slowdowns
from kvframework_bench.cuda.memory import DeviceMemory
from kvframework_bench.cuda.run import bench_cuda
from kvframework_bench.cuda.workload import SHAPES, Sizes
from kvframework_bench.errors import BenchFailed, Skipped

TINY = Sizes(
    shapes=tuple(
        msgspec.structs.replace(shape, layers=2, heads=min(shape.heads, 2), head_dim=16, block_tokens=tokens)
        for shape, tokens in zip(SHAPES.values(), (16, 16, 64, 64), strict=True)
    ),
    chunks=(1, 2),
    rounds=2,
    row_s=60.0,
    patience_s=60.0,
    submits=5,
    matmul_chunks=1,
    matmul_rounds=2,
    sweep_bytes=512 << 10,
    sweep_fragments=(1 << 10, 16 << 10),
    reserve=0,
)


class Outcome(msgspec.Struct):
    """`leaked` is memory of the device that was free before and is not at the end."""

    figures: CudaFigures | None = None
    loop: list[MatmulRow] = []
    loop_skipped: list[Skipped] = []
    error: str = ""
    leaked: int = 0


class CountingLoop:
    """Lasts for three looks at it, and takes as many seconds; one if it is alone."""

    def start(self) -> None:
        self._looks = 0

    def ended(self) -> bool:
        self._looks += 1
        return self._looks == 3

    def seconds(self) -> float:
        return float(max(self._looks, 1))


def run(parts: list[str], sizes: Sizes) -> Outcome:
    outcome = Outcome()
    with Device() as device:
        free = device.free_bytes()
        if "loop" in parts:
            outcome.loop, quiet = slowdowns(sizes, device, CountingLoop(), outcome.loop_skipped, no_progress)
            assert (quiet.min, quiet.max) == (1.0, 1.0)
        else:
            outcome.figures = bench_cuda(sizes, parts=parts)
        outcome.leaked = free - device.free_bytes()
    return outcome


def _one_wrong_bit() -> None:
    honest, calls = DeviceInstance.retrieve, []

    def corrupting(self: DeviceInstance, chunks: int) -> Timing:
        took = honest(self, chunks)
        calls.append(took)
        # The first ones are those that are compared before anything is measured.
        if len(calls) > 3:
            memory: DeviceMemory = self._memory
            device = memory._device
            at = memory._layers[1] + memory.target[0] * memory.shape.piece_bytes
            with device.pinned(1) as pinned:
                device.to_host(pinned.address, at, 1, memory._stream)
                device.synchronize(memory._stream)
                ctypes.c_ubyte.from_address(pinned.address).value ^= 1
                device.to_device(at, pinned.address, 1, memory._stream)
                device.synchronize(memory._stream)
        return took

    DeviceInstance.retrieve = corrupting  # type: ignore[method-assign]


def _a_miss() -> None:
    WorkerAdapter.submit_retrieve = lambda *_a, **_k: Future.resolved(LoadOutcome(False))  # type: ignore[method-assign]


def _a_drop() -> None:
    dropped = StoreOutcome(stored=0, present=1)
    WorkerAdapter.submit_store = lambda *_a, **_k: Future.resolved(dropped)  # type: ignore[method-assign]


class _HostEvent:
    """An event of a stream whose work is over as soon as it is asked for."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def elapsed_time(self, later: _HostEvent) -> float:
        return 1e3 * (later.at - self.at)


def _host_torch() -> None:
    """The steps of `decode` compute on the host, beside real transfers of the simulated GPU."""
    import torch

    host = SimpleNamespace(
        randn=lambda *shape, dtype, **_: torch.randn(*shape, dtype=dtype),
        mv=torch.mv,
        bfloat16=torch.bfloat16,
        cuda=SimpleNamespace(
            Stream=object,
            Event=lambda **_: _HostEvent(),
            stream=nullcontext,
            synchronize=lambda: None,
            OutOfMemoryError=MemoryError,
        ),
    )
    kvframework_bench.cuda.decode.cuda_torch = lambda: host


BUGS: dict[str, Callable[[], None]] = {
    "host torch": _host_torch,
    "": lambda: None,
    "wrong bit": _one_wrong_bit,
    "miss": _a_miss,
    "drop": _a_drop,
}


def main() -> None:
    parts, bug, changes = sys.argv[1:]
    BUGS[bug]()
    try:
        outcome = run(parts.split(), msgspec.convert(msgspec.to_builtins(TINY) | msgspec.json.decode(changes), Sizes))
    except BenchFailed as error:
        outcome = Outcome(error=f"{type(error).__name__}: {error}")
    sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")


if __name__ == "__main__":
    main()
