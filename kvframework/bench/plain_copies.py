"""Owns the buffers that `copy` is measured on, and the copies of the C library.

Runs in the bench's process and in that of `streaming_copy.py`, blocking.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvframework.bench.errors import WrongBytes
from kvframework.bench.interleave import Case, timed

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


def slices(nbytes: int, parts: int) -> list[tuple[int, int]]:
    """`parts` ranges `(start, length)` that cover `nbytes`, cut at pages; fewer if there are fewer pages."""
    step = -(-nbytes // parts // mmap.PAGESIZE) * mmap.PAGESIZE
    return [(start, min(step, nbytes - start)) for start in range(0, nbytes, step)]


def libc_copies(name: str, buffers: Buffers, pool: ThreadPoolExecutor, threads: int) -> list[Copy]:
    """The C library's copy. ctypes lets the interpreter go meanwhile."""

    def part(start: int, length: int) -> None:
        ctypes.memmove(buffers.target_at + start, buffers.source_at + start, length)

    return threaded(name, buffers.nbytes, part, pool, threads)


def threaded(
    name: str, nbytes: int, part: Callable[[int, int], None], pool: ThreadPoolExecutor, threads: int
) -> list[Copy]:
    """`part(start, length)` over all bytes by one thread, and by `threads` over slices."""

    def alone() -> float:
        return timed(lambda: part(0, nbytes))

    def together() -> float:
        starts, lengths = zip(*slices(nbytes, threads), strict=True)
        return timed(lambda: list(pool.map(part, starts, lengths)))

    ways = [Copy(way_name(name, 1), nbytes, alone)]
    if threads > 1:
        ways.append(Copy(way_name(name, threads), nbytes, together))
    return ways


def way_name(way: str, threads: int) -> str:
    return f"{way}, {threads} thread{'s' if threads > 1 else ''}"


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
