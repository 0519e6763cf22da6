"""The clock of the copies alone, and a profile of the rest of a hit. In the engine's process.

The clock is set around the compiled copy kernel of transport cpu_gather; without the kernel (torch copies
instead) nothing separates a copy from the Python around it. The profiler sees one thread and slows every call,
short ones most.
"""

from __future__ import annotations

import cProfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from kvf_cpu_gather import kernel
from kvframework_bench.contention.figures import HotSpot
from kvframework_bench.errors import BenchUnavailable

# Where a profiler sees the copy: the compiled call has no frame of its own.
FILE = __file__


class CopyClock:
    """Processor time within `calls` copies so far, in seconds: of all threads of this process, and `own` of the asking
    thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.own = 0.0
        self.calls = 0

    def around(self, copy: Callable[..., int]) -> Callable[..., int]:
        """Return `copy`, timed. It starts and joins its own threads, whose time counts."""

        def timed_copy(*arguments: object) -> int:
            before, own_before = time.process_time(), time.thread_time()
            try:
                return copy(*arguments)
            finally:
                self.own += time.thread_time() - own_before
                self.seconds += time.process_time() - before
                self.calls += 1

        return timed_copy


@contextmanager
def copy_clock() -> Iterator[CopyClock]:
    """Run the clock for the copies of instances that register within the context. Raises `BenchUnavailable` without the
    kernel."""
    if kernel.load_kernel() is None:
        raise BenchUnavailable(
            "the install has no compiled copy kernel of transport cpu_gather",
            hint="install kvframework on a machine with a C compiler",
        )
    clock = CopyClock()
    with kernel.wrapping_copies(clock.around):
        yield clock


# The profiler counts its own end among the calls.
_PROFILER = "_lsprof"


class Entry(NamedTuple):
    """The profiler's entry of a function: its code (its name if it has none), calls, and own seconds."""

    code: CodeType | str
    calls: int
    own_s: float


def profiled(call: Callable[[], object], count: int) -> list[Entry]:
    """Make `count` calls under the profiler, whose clock is this thread's processor time: waiting costs nothing."""
    profile = cProfile.Profile(time.thread_time_ns, 1e-9)
    for _ in range(count):
        profile.runcall(call)
    profile.disable()
    return [
        Entry(entry.code, entry.callcount, entry.inlinetime)
        for entry in profile.getstats()
        if _PROFILER not in str(entry.code)
    ]


def hottest(entries: Iterable[Entry], count: int, *, top: int, without: Collection[str]) -> list[HotSpot]:
    """Return the `top` functions by own time, of `count` calls, except those of the files `without`."""
    kept = [entry for entry in entries if isinstance(entry.code, str) or entry.code.co_filename not in without]
    total = sum(entry.own_s for entry in kept)
    ordered = sorted(kept, key=lambda entry: entry.own_s, reverse=True)[:top]
    return [
        HotSpot(_name(entry.code), entry.calls / count, entry.own_s / count * 1e6, entry.own_s / total)
        for entry in ordered
    ]


def _name(code: CodeType | str) -> str:
    if isinstance(code, str):
        return code.strip("<>")
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}: {getattr(code, 'co_qualname', code.co_name)}"
