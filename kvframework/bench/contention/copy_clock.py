"""Owns the processor time of the copies alone: a clock around the call of the transport's compiled copy kernel.

In the engine's process. The kernel is the transport's own, imported when a clock is asked for; without it (torch copies
instead) nothing tells a copy from the Python around it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvframework.bench.errors import BenchUnavailable

# Where a profiler sees the copy: the compiled call has no frame of its own.
FILE = __file__
_KERNEL = "kvf_cpu_gather.kernel"


class CopyClock:
    """Processor time within `calls` copies so far, in seconds: of all threads of this process, and `own` of the thread
    that asks for them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.own = 0.0
        self.calls = 0

    def around(self, copy: Callable[..., int]) -> Callable[..., int]:
        """`copy`, timed. It starts and joins its own threads, whose time counts."""

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
    """Runs for the copies of whatever registers within the context. Raises `BenchUnavailable` without the kernel."""
    module: Any = importlib.import_module(_KERNEL)
    load = module.load_kernel
    if load() is None:
        raise BenchUnavailable(
            "the copy kernel of transport cpu_gather was not built", hint="install it where there is a C compiler"
        )
    clock = CopyClock()

    def load_timed(threads: int = 0) -> Any:
        kernel = load(threads)
        kernel._copy = clock.around(kernel._copy)
        return kernel

    module.load_kernel = load_timed
    try:
        yield clock
    finally:
        module.load_kernel = load
