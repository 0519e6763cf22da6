"""Owns the part `transfers`: store and retrieve of every shape, by every engine, beside one plain pinned copy.

This process plays the engine; for each way of copying there is a server, whose copier is a third process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvframework.api import ByteSize
from kvframework.bench.attempt import NotMeasured, attempt
from kvframework.bench.cuda.device import Device
from kvframework.bench.cuda.document import Moved, TransferRow
from kvframework.bench.cuda.instance import DeviceInstance, running_client
from kvframework.bench.cuda.memory import DeviceMemory
from kvframework.bench.cuda.plain import PlainCopies, plain_copies
from kvframework.bench.cuda.shapes import CudaShape
from kvframework.bench.cuda.sizes import REACH, Sizes
from kvframework.bench.interleave import Case, interleave
from kvframework.bench.machine import available_bytes
from kvframework.bench.progress import Stage
from kvframework.bench.statistics import Rounds, rate_gb_s, ratio
from kvframework.client import KVClient


def bench_transfers(
    sizes: Sizes, device: Device, directory: Path, not_measured: list[NotMeasured], stage: Stage
) -> list[TransferRow]:
    """Steps that do not fit into memory, or would take too long, are named in `not_measured`. Raises `BenchFailed`, and
    `WrongBytes` if a byte that came back is wrong."""
    fitting = {shape: fitting_steps(sizes, shape, device, not_measured) for shape in sizes.shapes}
    largest = max((shape.nbytes(max(steps)) for shape, steps in fitting.items() if steps), default=0)
    if not largest:
        return []
    rows = []
    with plain_copies(device, largest) as plain:

        def measure(engine: str) -> list[TransferRow]:
            with running_client(directory, engine, largest) as client:
                return [
                    row
                    for shape, steps in fitting.items()
                    if steps
                    for row in _shape(sizes, device, client, plain, engine, shape, steps, not_measured, stage)
                ]

        for engine in sizes.engines:
            rows += attempt(not_measured, f"engine {engine}", partial(measure, engine)) or []
    return rows


def fitting_steps(sizes: Sizes, shape: CudaShape, device: Device, not_measured: list[NotMeasured]) -> tuple[int, ...]:
    """The steps of `shape` for which there is memory now; the others are named."""
    device_free, host_free = device.free_bytes(), available_bytes()
    steps = sizes.fitting(shape, device_free=device_free, host_free=host_free)
    for chunks in sizes.chunks:
        if chunks not in steps:
            why = f"needs {ByteSize(4 * shape.nbytes(chunks) + sizes.reserve)} of the GPU and as much of the host"
            hint = f"free: {ByteSize(device_free)} and {ByteSize(host_free)}"
            not_measured.append(NotMeasured(_name(shape, chunks), why, hint))
    return steps


def _shape(
    sizes: Sizes,
    device: Device,
    client: KVClient,
    plain: PlainCopies,
    engine: str,
    shape: CudaShape,
    steps: Sequence[int],
    not_measured: list[NotMeasured],
    stage: Stage,
) -> list[TransferRow]:
    rows: list[TransferRow] = []
    with DeviceMemory(device, shape, steps[-1]) as memory, DeviceInstance(client, memory, steps[-1]) as instance:
        # Of the first request the copier's preparations are a part.
        instance.store(steps[0])
        instance.verify(steps[0])
        bytes_s = shape.nbytes(steps[0]) / instance.store(steps[0]).whole
        for chunks in steps:
            expected_s = shape.nbytes(chunks) / bytes_s
            if expected_s > sizes.patience_s:
                why = f"a store would take about {expected_s:.1f} s"
                not_measured.append(NotMeasured(f"{_name(shape, chunks)}, engine {engine}", why, ""))
                continue
            store_s = instance.store(chunks).whole
            bytes_s = shape.nbytes(chunks) / store_s
            rounds = sizes.rounds_of(store_s)
            with stage(f"{_name(shape, chunks)}, engine {engine}", rounds) as advance:
                measured = interleave(_cases(instance, plain, shape, chunks), rounds=rounds, advance=advance)
            instance.verify(chunks)
            rows.append(_row(engine, shape, chunks, rounds, measured))
    return rows


def _cases(instance: DeviceInstance, plain: PlainCopies, shape: CudaShape, chunks: int) -> dict[str, Case]:
    nbytes = shape.nbytes(chunks)
    return {
        "plain store": lambda: plain.store(nbytes),
        "store": lambda: instance.store(chunks).whole,
        "plain retrieve": lambda: plain.retrieve(nbytes),
        "retrieve": lambda: instance.retrieve(chunks).whole,
        "plain both": lambda: plain.both(nbytes),
        "both": lambda: instance.both(chunks),
    }


def _row(
    engine: str, shape: CudaShape, chunks: int, rounds: int, measured: dict[str, list[list[float]]]
) -> TransferRow:
    nbytes = shape.nbytes(chunks)
    store, retrieve, both = (
        moved(total, measured[kind], measured[f"plain {kind}"])
        for kind, total in (("store", nbytes), ("retrieve", nbytes), ("both", 2 * nbytes))
    )
    return TransferRow(
        engine=engine,
        shape=shape.name,
        block_tokens=shape.block_tokens,
        fragment_bytes=shape.fragment_bytes,
        chunks=chunks,
        nbytes=nbytes,
        rounds=rounds,
        store=store,
        retrieve=retrieve,
        both=both,
        reach=REACH,
    )


def moved(nbytes: int, own: Rounds, plain: Rounds) -> Moved:
    """Of seconds that each moved `nbytes`."""
    return Moved(rate_gb_s(nbytes, own), rate_gb_s(nbytes, plain), ratio(plain, own))


def _name(shape: CudaShape, chunks: int) -> str:
    return f"{shape.name}, block {shape.block_tokens}, {chunks} chunk{'s' if chunks > 1 else ''}"
