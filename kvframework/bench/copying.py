"""Owns `copy`, the reference of all bulk figures: the fastest plain copy of some bytes that the cores reach together.

NumPy and torch take part if they are installed. Runs in the bench's process, blocking.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from kvframework.bench.errors import WrongBytes
from kvframework.bench.interleave import Case, interleave, timed
from kvframework.bench.machine import cores
from kvframework.bench.statistics import percentile

# Copied by each way before one is chosen, so that small sizes, which scatter more, are tried more often.
_TRIED_BYTES = 1 << 30

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


@dataclass(frozen=True)
class Copy:
    """One way to copy `nbytes` from one touched buffer to another; `run` does it once and returns the seconds."""

    name: str
    nbytes: int
    run: Case


class Buffers:
    """A source and a target of equal size, page-aligned, both touched. They go with the last view of them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.source, self.target = mmap.mmap(-1, nbytes), mmap.mmap(-1, nbytes)
        self.source_at, self.target_at = _address(self.source), _address(self.target)
        ctypes.memset(self.source_at, 0x5A, nbytes)
        ctypes.memset(self.target_at, 0, nbytes)

    def check(self, copy: Copy) -> None:
        """One copy into an empty target. Raises `WrongBytes` if the source did not arrive there."""
        ctypes.memset(self.target_at, 0, self.nbytes)
        copy.run()
        if _memcmp(self.source_at, self.target_at, self.nbytes):
            raise WrongBytes(f"the copy by {copy.name} did not copy everything")


@contextmanager
def copies(nbytes: int) -> Iterator[list[Copy]]:
    """All ways to copy `nbytes` here, each one checked. Their buffers and threads live as long as the context."""
    buffers, threads = Buffers(nbytes), cores()
    with ThreadPoolExecutor(threads, thread_name_prefix="kvf-copy") as pool:
        ways = _libc(buffers, pool, threads)
        if importlib.util.find_spec("numpy"):
            ways += _numpy(buffers, pool, threads)
        if importlib.util.find_spec("torch"):
            ways += _torch(buffers, threads)
        for way in ways:
            buffers.check(way)
        yield ways


@contextmanager
def fastest_copy(nbytes: int) -> Iterator[Copy]:
    """`copy` for a bench of `nbytes`: the way with the best median of some interleaved rounds. Takes about a second."""
    rounds = min(max(_TRIED_BYTES // nbytes, 5), 50)
    with copies(nbytes) as ways:
        yield fastest(ways, interleave({way.name: way.run for way in ways}, rounds=rounds))


def fastest(ways: Sequence[Copy], measured: dict[str, list[list[float]]]) -> Copy:
    """The way with the smallest median."""
    return min(ways, key=lambda way: percentile(sorted(s for samples in measured[way.name] for s in samples), 0.5))


def slices(nbytes: int, parts: int) -> list[tuple[int, int]]:
    """`parts` ranges `(start, length)` that cover `nbytes`, cut at pages; fewer if there are fewer pages."""
    step = -(-nbytes // parts // mmap.PAGESIZE) * mmap.PAGESIZE
    return [(start, min(step, nbytes - start)) for start in range(0, nbytes, step)]


def _libc(buffers: Buffers, pool: ThreadPoolExecutor, threads: int) -> list[Copy]:
    """The C library's copy, which takes streaming stores for big sizes. ctypes lets the interpreter go meanwhile."""

    def part(start: int, length: int) -> None:
        ctypes.memmove(buffers.target_at + start, buffers.source_at + start, length)

    return _threaded("libc memmove", buffers.nbytes, part, pool, threads)


def _numpy(buffers: Buffers, pool: ThreadPoolExecutor, threads: int) -> list[Copy]:
    import numpy as np

    source, target = (np.frombuffer(buffer, dtype=np.uint8) for buffer in (buffers.source, buffers.target))

    def part(start: int, length: int) -> None:
        np.copyto(target[start : start + length], source[start : start + length])

    return _threaded("numpy copyto", buffers.nbytes, part, pool, threads)


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

    return [Copy(_name("torch copy_", n), buffers.nbytes, case(n)) for n in sorted({1, threads})]


def _threaded(
    name: str, nbytes: int, part: Callable[[int, int], None], pool: ThreadPoolExecutor, threads: int
) -> list[Copy]:
    def alone() -> float:
        return timed(lambda: part(0, nbytes))

    def together() -> float:
        starts, lengths = zip(*slices(nbytes, threads), strict=True)
        return timed(lambda: list(pool.map(part, starts, lengths)))

    ways = [Copy(_name(name, 1), nbytes, alone)]
    if threads > 1:
        ways.append(Copy(_name(name, threads), nbytes, together))
    return ways


def _name(way: str, threads: int) -> str:
    return f"{way}, {threads} thread{'s' if threads > 1 else ''}"


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
