"""Owns `copy`, the reference of all bulk figures: the fastest plain copy of some bytes that the cores reach together.

NumPy and torch take part if they are installed. Runs in the bench's process, blocking.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from kvframework.bench.interleave import Case, interleave, timed
from kvframework.bench.machine import cores
from kvframework.bench.plain_copies import Buffers, Copy, libc_copies, threaded, way_name
from kvframework.bench.statistics import percentile
from kvframework.bench.streaming_copy import streaming_copies

# Copied by each way before one is chosen, so that small sizes, which scatter more, are tried more often.
_TRIED_BYTES = 4 << 30


@contextmanager
def copies(nbytes: int) -> Iterator[list[Copy]]:
    """All ways to copy `nbytes` here, each one checked. Their buffers and threads live as long as the context."""
    buffers, threads = Buffers(nbytes), cores()
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="kvf-copy") as pool,
        streaming_copies(nbytes, threads) as streaming,
    ):
        ways = libc_copies("libc memmove", buffers, pool, threads)
        if importlib.util.find_spec("numpy"):
            ways += _numpy(buffers, pool, threads)
        if importlib.util.find_spec("torch"):
            ways += _torch(buffers, threads)
        for way in ways:
            buffers.check(way)
        yield ways + streaming


@contextmanager
def fastest_copy(nbytes: int) -> Iterator[Copy]:
    """`copy` for a bench of `nbytes`: the way with the best median of some interleaved rounds. Some seconds."""
    rounds = min(max(_TRIED_BYTES // nbytes, 5), 50)
    with copies(nbytes) as ways:
        yield fastest(ways, interleave({way.name: way.run for way in ways}, rounds=rounds))


def fastest(ways: Sequence[Copy], measured: dict[str, list[list[float]]]) -> Copy:
    """The way with the smallest median."""
    return min(ways, key=lambda way: percentile(sorted(s for samples in measured[way.name] for s in samples), 0.5))


def _numpy(buffers: Buffers, pool: ThreadPoolExecutor, threads: int) -> list[Copy]:
    import numpy as np

    source, target = (np.frombuffer(buffer, dtype=np.uint8) for buffer in (buffers.source, buffers.target))

    def part(start: int, length: int) -> None:
        np.copyto(target[start : start + length], source[start : start + length])

    return threaded("numpy copyto", buffers.nbytes, part, pool, threads)


def _torch(buffers: Buffers, threads: int) -> list[Copy]:
    import torch

    source, target = (torch.frombuffer(buffer, dtype=torch.uint8) for buffer in (buffers.source, buffers.target))

    def case(count: int) -> Case:
        def run() -> float:
            before = torch.get_num_threads()
            torch.set_num_threads(count)
            try:
                return timed(lambda: target.copy_(source))
            finally:
                torch.set_num_threads(before)

        return run

    return [Copy(way_name("torch copy_", n), buffers.nbytes, case(n)) for n in sorted({1, threads})]
