"""The copy reference of all bulk figures: the fastest plain copy of some bytes that the cores reach together.

NumPy and torch take part if they are installed. Copies run in the benchmark's process, blocking; those with streaming
stores run in a child process. By itself the C library takes streaming stores only for sizes above that of the caches it
detects, which in a virtual machine may be all of the host's. It reads that bound once, when a process starts. `python
-m kvframework_bench.copy_reference NBYTES THREADS` prints the names of its copies, then copies once for each line it
reads, by the copy of that number, and answers with the seconds. It ends with its standard input.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from kvframework_bench.errors import WrongBytes
from kvframework_bench.machine import cores
from kvframework_bench.process import BenchChild, running, scratch
from kvframework_bench.rounds import Case, interleave, percentile, timed

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


# For some 5 ms after torch had work for several threads they look for more, and take the cores from what comes next.
TORCH_ENDS_S = 0.02


@dataclass(frozen=True)
class Copy:
    """One way to copy `nbytes` from one touched buffer to another; `run` does it once and returns the seconds."""

    name: str
    nbytes: int
    run: Case


class Buffers:
    """A source and a target of equal size, page-aligned, both touched. They are freed with the last view of them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.source, self.target = mmap.mmap(-1, nbytes), mmap.mmap(-1, nbytes)
        self.source_at, self.target_at = _address(self.source), _address(self.target)
        ctypes.memset(self.source_at, 0x5A, nbytes)
        ctypes.memset(self.target_at, 0, nbytes)

    def check(self, copy: Copy) -> None:
        """Copy once into an empty target. Raises `WrongBytes` if the source did not arrive there."""
        ctypes.memset(self.target_at, 0, self.nbytes)
        copy.run()
        if _memcmp(self.source_at, self.target_at, self.nbytes):
            raise WrongBytes(f"the target of the copy by {copy.name} differs from its source")


def slices(nbytes: int, parts: int) -> list[tuple[int, int]]:
    """Return `parts` ranges `(start, length)` that cover `nbytes`, cut at pages; fewer if there are fewer pages."""
    step = -(-nbytes // parts // mmap.PAGESIZE) * mmap.PAGESIZE
    return [(start, min(step, nbytes - start)) for start in range(0, nbytes, step)]


def libc_copies(name: str, buffers: Buffers, pool: ThreadPoolExecutor, threads: int) -> list[Copy]:
    """Return the C library's copies. ctypes releases the interpreter meanwhile."""

    def part(start: int, length: int) -> None:
        ctypes.memmove(buffers.target_at + start, buffers.source_at + start, length)

    return threaded(name, buffers.nbytes, part, pool, threads)


def threaded(
    name: str, nbytes: int, part: Callable[[int, int], None], pool: ThreadPoolExecutor, threads: int
) -> list[Copy]:
    """Return copies by `part(start, length)`: over all bytes by one thread, and by `threads` over slices."""

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


# Bytes that each way copies before one is chosen, so that small sizes, which scatter more, are tried more often.
_TRIED_BYTES = 4 << 30


@contextmanager
def copies(nbytes: int) -> Iterator[list[Copy]]:
    """Yield all ways to copy `nbytes` here, each one checked. Their buffers and threads live as long as the context."""
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
    """Yield `copy` for a bench of `nbytes`: the way with the best median of some interleaved rounds. Some seconds."""
    rounds = min(max(_TRIED_BYTES // nbytes, 5), 50)
    with copies(nbytes) as ways:
        yield fastest(ways, interleave({way.name: way.run for way in ways}, rounds=rounds))


def fastest(ways: Sequence[Copy], measured: dict[str, list[list[float]]]) -> Copy:
    """Return the way with the smallest median."""
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
                time.sleep(TORCH_ENDS_S)

        return run

    return [Copy(way_name("torch copy_", n), buffers.nbytes, case(n)) for n in sorted({1, threads})]


_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x100000"


@contextmanager
def streaming_copies(nbytes: int, threads: int) -> Iterator[list[Copy]]:
    """Yield copies of `nbytes` by one thread and by `threads`, each checked, in a process that lives as long as the
    context. Raises `BenchFailed` if it cannot be started."""
    known = os.environ.get("GLIBC_TUNABLES")
    setting = f"GLIBC_TUNABLES={known + ':' if known else ''}{_TUNABLES}"
    command = ["env", setting, sys.executable, "-m", "kvframework_bench.copy_reference", str(nbytes), str(threads)]
    with scratch() as directory, running("streaming copy", command, directory, piped=True) as child:
        ways: list[Copy] = []
        while name := _answer(child).strip():
            ways.append(Copy(name, nbytes, partial(_once, child, len(ways))))
        yield ways


def _once(child: BenchChild, index: int) -> float:
    child.stdin.write(b"%d\n" % index)
    child.stdin.flush()
    return float(_answer(child))


def _answer(child: BenchChild) -> str:
    line = child.stdout.readline()
    if not line:
        raise child.failure("ended")
    return line.decode()


def _serve(nbytes: int, threads: int) -> None:
    buffers = Buffers(nbytes)
    with ThreadPoolExecutor(threads) as pool:
        ways = libc_copies("streaming stores", buffers, pool, threads)
        for way in ways:
            buffers.check(way)
            sys.stdout.write(f"{way.name}\n")
        _print_line("")
        for line in sys.stdin:
            _print_line(str(ways[int(line)].run()))


def _print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
