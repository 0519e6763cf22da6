"""Owns the process that copies past the caches: the C library's copy, told to take streaming stores.

By itself the C library does so only for what is larger than the caches it believes in, which in a virtual machine may
be all of the host's. It reads that bound once, when a process starts: hence a process of its own.
`python -m kvframework.bench.streaming_copy NBYTES THREADS` tells the names of its ways, then copies once for each line
it reads, in the way of that number, and answers with the seconds. It ends when its standard input does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from kvframework.bench.child import BenchChild, running, scratch
from kvframework.bench.plain_copies import Buffers, Copy, libc_copies

_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x100000"


@contextmanager
def streaming_copies(nbytes: int, threads: int) -> Iterator[list[Copy]]:
    """Copies of `nbytes` by one thread and by `threads`, each checked, in a process that lives as long as the
    context. Raises `BenchFailed` if it cannot be started."""
    known = os.environ.get("GLIBC_TUNABLES")
    setting = f"GLIBC_TUNABLES={known + ':' if known else ''}{_TUNABLES}"
    command = ["env", setting, sys.executable, "-m", "kvframework.bench.streaming_copy", str(nbytes), str(threads)]
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
        _tell("")
        for line in sys.stdin:
            _tell(str(ways[int(line)].run()))


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
