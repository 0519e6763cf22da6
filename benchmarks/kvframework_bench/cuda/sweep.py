"""The part `sweep`: fragments from small to large, moved by copy engines and by the kernel, and where the two cross.

Both servers run at once, so that their samples alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvframework.client import KVClient
from kvframework_bench.console import Stage
from kvframework_bench.cuda.device import Device, PlainCopies, plain_copies
from kvframework_bench.cuda.figures import SweepFigures, SweepRow
from kvframework_bench.cuda.instance import DeviceInstance, running_client
from kvframework_bench.cuda.memory import DeviceMemory
from kvframework_bench.cuda.workload import Sizes, fragment_shape
from kvframework_bench.errors import Skipped
from kvframework_bench.process import scratch
from kvframework_bench.rounds import Case, interleave, rate_gb_s, ratio

ENGINES = ("dma", "kernel")


def bench_sweep(
    sizes: Sizes, device: Device, _directory: Path, _not_measured: list[Skipped], stage: Stage
) -> SweepFigures:
    """Measure the sweep. Raises `BenchFailed`, and `WrongBytes` if a retrieved byte is wrong."""
    rows: list[SweepRow] = []
    shapes = [fragment_shape(size, sizes.sweep_bytes) for size in sizes.sweep_fragments]
    largest = max(shape.nbytes(chunks) for shape, chunks in shapes)
    with ExitStack() as stack:
        plain = stack.enter_context(plain_copies(device, largest))
        clients = {}
        for engine in ENGINES:
            directory = stack.enter_context(scratch())
            clients[engine] = stack.enter_context(running_client(directory, engine, largest))
        for size in sizes.sweep_fragments:
            rows += _rows(sizes, size, device, clients, plain, stage)
    return SweepFigures(rows, crossing(rows))


def crossing(rows: Sequence[SweepRow]) -> int | None:
    """Return the smallest size from which on copy engines are at least as fast as the kernel, in all rows of it and of
    larger ones; None if there is none."""
    slower = [row.fragment_bytes for row in rows if row.dma_gb_s.median < row.kernel_gb_s.median]
    return min((row.fragment_bytes for row in rows if row.fragment_bytes > max(slower, default=0)), default=None)


def _rows(
    sizes: Sizes, fragment_bytes: int, device: Device, clients: dict[str, KVClient], plain: PlainCopies, stage: Stage
) -> list[SweepRow]:
    shape, chunks = fragment_shape(fragment_bytes, sizes.sweep_bytes)
    nbytes = shape.nbytes(chunks)
    with ExitStack() as stack:
        memory = stack.enter_context(DeviceMemory(device, shape, chunks))
        cases: dict[str, Case] = {
            "plain store": lambda: plain.store(nbytes),
            "plain retrieve": lambda: plain.retrieve(nbytes),
        }
        instances = [
            (engine, stack.enter_context(DeviceInstance(client, memory, chunks))) for engine, client in clients.items()
        ]
        slowest = 0.0
        for engine, instance in instances:
            instance.store(chunks)
            instance.verify(chunks)
            slowest = max(slowest, instance.store(chunks).whole)
            for operation, case in instance.cases(chunks).items():
                cases[f"{engine} {operation}"] = case
        rounds = sizes.rounds_of(slowest)
        with stage(shape.name, rounds) as advance:
            measured = interleave(cases, rounds=rounds, advance=advance)
        for _, instance in instances:
            instance.verify(chunks)
    return [
        SweepRow(
            operation=operation,
            fragment_bytes=fragment_bytes,
            nbytes=nbytes,
            dma_gb_s=rate_gb_s(nbytes, measured[f"dma {operation}"]),
            kernel_gb_s=rate_gb_s(nbytes, measured[f"kernel {operation}"]),
            dma_ratio=ratio(measured[f"plain {operation}"], measured[f"dma {operation}"]),
            kernel_ratio=ratio(measured[f"plain {operation}"], measured[f"kernel {operation}"]),
        )
        for operation in ("store", "retrieve")
    ]
