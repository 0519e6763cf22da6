"""The parts `transfers` and `submits`: every shape by every engine next to one plain pinned copy; the cost of a
submit.

This process plays the engine; for each way of copying there is a server, whose copier is a third process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvframework.api.plugin import ByteSize
from kvframework.client import KVClient
from kvframework_bench.console import Stage
from kvframework_bench.cuda.device import Device, PlainCopies, plain_copies
from kvframework_bench.cuda.figures import Moved, SubmitRow, TransferRow
from kvframework_bench.cuda.instance import DeviceInstance, running_client
from kvframework_bench.cuda.memory import DeviceMemory
from kvframework_bench.cuda.workload import SUBMIT_US, TARGET_RATIO, CudaShape, Sizes
from kvframework_bench.errors import Skipped, measure_or_skip
from kvframework_bench.machine import available_bytes
from kvframework_bench.rounds import Case, Latency, Rounds, interleave, rate_gb_s, ratio


def bench_transfers(
    sizes: Sizes, device: Device, directory: Path, skipped: list[Skipped], stage: Stage
) -> list[TransferRow]:
    """Steps that do not fit into memory, or would take too long, are named in `skipped`. Raises `BenchFailed`, and
    `WrongBytes` if a retrieved byte is wrong."""
    fitting = {shape: fitting_steps(sizes, shape, device, skipped) for shape in sizes.shapes}
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
                    for row in _shape(sizes, device, client, plain, engine, shape, steps, skipped, stage)
                ]

        for engine in sizes.engines:
            rows += measure_or_skip(skipped, f"engine {engine}", partial(measure, engine)) or []
    return rows


def fitting_steps(sizes: Sizes, shape: CudaShape, device: Device, skipped: list[Skipped]) -> tuple[int, ...]:
    """Return the steps of `shape` for which there is memory now; the others are added to `skipped`."""
    device_free, host_free = device.free_bytes(), available_bytes()
    steps = sizes.fitting(shape, device_free=device_free, host_free=host_free)
    for chunks in sizes.chunks:
        if chunks not in steps:
            why = f"GPU and host need {ByteSize(4 * shape.nbytes(chunks) + sizes.reserve)} of memory each"
            hint = f"free: {ByteSize(device_free)} on the GPU, {ByteSize(host_free)} on the host"
            skipped.append(Skipped(_name(shape, chunks), why, hint))
    return steps


def _shape(
    sizes: Sizes,
    device: Device,
    client: KVClient,
    plain: PlainCopies,
    engine: str,
    shape: CudaShape,
    steps: Sequence[int],
    skipped: list[Skipped],
    stage: Stage,
) -> list[TransferRow]:
    rows: list[TransferRow] = []
    with DeviceMemory(device, shape, steps[-1]) as memory, DeviceInstance(client, memory, steps[-1]) as instance:
        # The first request includes the copier's preparations.
        instance.store(steps[0])
        instance.verify(steps[0])
        bytes_s = shape.nbytes(steps[0]) / instance.store(steps[0]).whole
        for chunks in steps:
            expected_s = shape.nbytes(chunks) / bytes_s
            if expected_s > sizes.patience_s:
                why = f"a store would take about {expected_s:.1f} s"
                skipped.append(Skipped(f"{_name(shape, chunks)}, engine {engine}", why, ""))
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
        target_ratio=TARGET_RATIO,
    )


def moved(nbytes: int, own: Rounds, plain: Rounds) -> Moved:
    """Return the figures of transfers that each moved `nbytes` in these seconds."""
    return Moved(rate_gb_s(nbytes, own), rate_gb_s(nbytes, plain), ratio(plain, own))


def _name(shape: CudaShape, chunks: int) -> str:
    return f"{shape.name}, block {shape.block_tokens}, {chunks} chunk{'s' if chunks > 1 else ''}"


def bench_submits(
    sizes: Sizes, device: Device, directory: Path, skipped: list[Skipped], stage: Stage
) -> list[SubmitRow]:
    """Measure submits of the first shape, by the first engine: a submit names blocks and does not read them. One
    transfer at a time, each waited for. Raises `BenchFailed`."""
    shape = sizes.shapes[0]
    steps = fitting_steps(sizes, shape, device, skipped)
    rows: list[SubmitRow] = []
    if not steps:
        return rows
    with (
        running_client(directory, sizes.engines[0], shape.nbytes(steps[-1])) as client,
        DeviceMemory(device, shape, steps[-1]) as memory,
        DeviceInstance(client, memory, steps[-1]) as instance,
    ):
        for chunks in steps:
            instance.store(chunks)
            instance.retrieve(chunks)
            cases = {
                "store": lambda chunks=chunks: instance.store(chunks).submit,
                "retrieve": lambda chunks=chunks: instance.retrieve(chunks).submit,
            }
            with stage(f"submitting {chunks} chunks", sizes.submits) as advance:
                measured = interleave(cases, rounds=sizes.submits, advance=advance)
            rows += [
                SubmitRow(name, chunks, shape.blocks(chunks), Latency.of(samples), SUBMIT_US)
                for name, samples in measured.items()
            ]
    return rows
