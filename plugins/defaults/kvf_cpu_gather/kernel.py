"""The Python side of the copy kernel (`native/copy.c`), an optional part of the build.

Engine side, blocking; it copies without the GIL.
"""

from __future__ import annotations

import array
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvframework.api.copy_plans import CopyBatch
from kvframework.api.installing import load_library

_LIBRARY = Path(__file__).with_name("native") / "libkvf_copy.so"
_ABI = 1
# Measured on two cores: at 2 MiB a second thread makes a copy slower, at 96 MiB nearly twice as fast.
BYTES_PER_THREAD = 4 << 20
# A choice, not a measurement: smaller objects may well be read from the caches soon, which streaming stores bypass.
STREAMING_BYTES = 4 << 20


class _Step(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint64), ("engine", ctypes.c_int64), ("arena", ctypes.c_int64))


class _Product(ctypes.Structure):
    _fields_ = (
        ("lane_addresses", ctypes.c_void_p),
        ("lane_offsets", ctypes.c_void_p),
        ("lanes", ctypes.c_uint64),
        ("place_addresses", ctypes.c_void_p),
        ("place_offsets", ctypes.c_void_p),
        ("places", ctypes.c_uint64),
        ("steps", ctypes.c_void_p),
        ("step_count", ctypes.c_uint64),
        ("run", ctypes.c_uint64),
        ("arena", ctypes.c_void_p),
        ("to_arena", ctypes.c_int32),
        ("streaming", ctypes.c_int32),
    )


# The compiled call (batch and number of threads); returns 0 if the copy was done. Blocks, without the GIL.
NativeCopy = Callable[..., int]

_wrappers: list[Callable[[NativeCopy], NativeCopy]] = []


@contextmanager
def wrapping_copies(wrap: Callable[[NativeCopy], NativeCopy]) -> Iterator[None]:
    """Make kernels that are loaded within the context call `wrap(copy)` in place of the compiled `copy`, for their
    lifetime: for benchmarks that time the copy apart from the Python around it. For one thread."""
    _wrappers.append(wrap)
    try:
        yield
    finally:
        _wrappers.remove(wrap)


class CopyKernel:
    """Stateless but for its bound on threads; may be called by several threads."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        library.kvf_copy.argtypes = (ctypes.POINTER(_Product), ctypes.c_uint32)
        library.kvf_copy.restype = ctypes.c_int
        self._copy: NativeCopy = library.kvf_copy
        for wrap in _wrappers:
            self._copy = wrap(self._copy)
        self._threads = threads

    def copy(self, batch: CopyBatch, arena: int, *, to_arena: bool) -> None:
        """Copy every fragment between engine memory and the arena mapped at address `arena`; blocks until done.

        Every address must be valid: they were checked when the batch was planned.
        """
        # Engine memory in its own order, both ways: measured 1.2 to 5 times as fast with tokens inside heads.
        ordered = sorted(batch.steps, key=lambda step: step.device, reverse=True)
        steps = (_Step * len(ordered))(*(_Step(*step) for step in ordered))
        nbytes = batch.nbytes
        product = _Product(
            _address(batch.lane_addresses),
            _address(batch.lane_offsets),
            len(batch.lane_addresses),
            _address(batch.place_addresses),
            _address(batch.place_offsets),
            len(batch.place_addresses),
            ctypes.addressof(steps),
            len(batch.steps),
            batch.run,
            arena,
            to_arena,
            nbytes >= STREAMING_BYTES,
        )
        if self._copy(ctypes.byref(product), min(max(nbytes // BYTES_PER_THREAD, 1), self._threads)) != 0:
            raise ValueError(f"the kernel refuses a copy of {len(batch.steps)} steps with runs of {batch.run} bytes")


def load_kernel(threads: int = 0) -> CopyKernel | None:
    """Return the kernel, None where it was not built or does not fit; `threads` 0: one per core of this process."""
    library = _library()
    return CopyKernel(library, threads or len(os.sched_getaffinity(0))) if library is not None else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_library(_LIBRARY, "kvf_copy", _ABI, instead="torch copies the blocks")


def _address(values: array.array[int]) -> int:
    return values.buffer_info()[0]
