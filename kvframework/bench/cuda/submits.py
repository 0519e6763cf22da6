"""Owns the part `submits`: what a store and a retrieve take of the engine's own thread, until the call is back."""

from __future__ import annotations

from pathlib import Path

from kvframework.bench.attempt import NotMeasured
from kvframework.bench.cuda.device import Device
from kvframework.bench.cuda.document import SubmitRow
from kvframework.bench.cuda.instance import DeviceInstance, running_client
from kvframework.bench.cuda.memory import DeviceMemory
from kvframework.bench.cuda.moving import fitting_steps
from kvframework.bench.cuda.sizes import SUBMIT_US, Sizes
from kvframework.bench.interleave import interleave
from kvframework.bench.progress import Stage
from kvframework.bench.statistics import Latency


def bench_submits(
    sizes: Sizes, device: Device, directory: Path, not_measured: list[NotMeasured], stage: Stage
) -> list[SubmitRow]:
    """Of the first shape, by the first engine: a submit names blocks and does not see them. One transfer at a time,
    each waited for. Raises `BenchFailed`."""
    shape = sizes.shapes[0]
    steps = fitting_steps(sizes, shape, device, not_measured)
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
