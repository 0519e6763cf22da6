"""Owns the part `matmul`: what transfers take of the GPU's other work, by each engine, and what plain copies take.

In every round the loop runs once alone and once beside each kind of transfer.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from kvframework.bench.attempt import NotMeasured, attempt
from kvframework.bench.child import scratch
from kvframework.bench.cuda.device import Device
from kvframework.bench.cuda.document import MatmulFigures, MatmulRow
from kvframework.bench.cuda.instance import DeviceInstance, running_client
from kvframework.bench.cuda.matmul import Loop, MatmulLoop
from kvframework.bench.cuda.memory import DeviceMemory
from kvframework.bench.cuda.plain import plain_copies
from kvframework.bench.cuda.sizes import Sizes
from kvframework.bench.interleave import Case, interleave
from kvframework.bench.progress import Stage
from kvframework.bench.statistics import Spread, rate_gb_s, ratio

_QUIET = "quiet"


def bench_matmul(
    sizes: Sizes, device: Device, _directory: Path, not_measured: list[NotMeasured], stage: Stage
) -> MatmulFigures:
    """Raises `BenchUnavailable` without a torch that can use the GPU, and `BenchFailed`."""
    loop = MatmulLoop(sizes.matmul_size, sizes.loop_s)
    shape, chunks = sizes.shapes[0], sizes.matmul_chunks
    rows, quiet = slowdowns(sizes, device, loop, not_measured, stage)
    tflop_s = Spread(*(loop.operations / seconds / 1e12 for seconds in (quiet.max, quiet.median, quiet.min)))
    return MatmulFigures(sizes.matmul_size, shape.name, chunks, tflop_s, rows)


def slowdowns(
    sizes: Sizes, device: Device, loop: Loop, not_measured: list[NotMeasured], stage: Stage
) -> tuple[list[MatmulRow], Spread]:
    """Of `loop` beside stores and beside retrieves of each engine and of plain copies; and its quiet seconds."""
    shape, chunks = sizes.shapes[0], sizes.matmul_chunks
    nbytes = shape.nbytes(chunks)
    transfers: dict[tuple[str, str], _Beside] = {}
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
            ways[engine] = attempt(not_measured, f"matmul, engine {engine}", partial(by_server, engine)) or {}
        for engine, ways_of in ways.items():
            for operation, case in ways_of.items():
                transfers[engine, operation] = _Beside(loop, case)
        cases: dict[str, Case] = {_QUIET: lambda: _alone(loop)}
        cases |= {f"{engine} {operation}": each.run for (engine, operation), each in transfers.items()}
        with stage("multiplying matrices beside transfers", sizes.matmul_rounds) as advance:
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


class _Beside:
    """The loop, with one transfer after the other until it has ended; `moved` are the seconds of all of them."""

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
