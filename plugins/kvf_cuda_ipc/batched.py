"""Owns copies by the GPU's copy engines: all fragments of a batch in one call of `cuMemcpyBatchAsync`. In the copier.

Format of the attributes: cuda.h of CUDA 12.8, `CUmemcpyAttributes`. The driver reads the columns during the call.
"""

from __future__ import annotations

import array
import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from kvf_cuda_ipc.driver import Driver, RawStream, check_status
from kvframework.api.driver import CopyBatch

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Attributes(ctypes.Structure):
    """The hints say nothing: they are for managed memory."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_CALL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
)


class BatchedCopies:
    """`address` is where the driver's call is. Never blocks."""

    def __init__(self, address: int) -> None:
        self._copy = _CALL(address)
        self._attributes = _Attributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE)
        self._first = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)

    @classmethod
    def of(cls, driver: Driver) -> BatchedCopies | None:
        """None where the driver is older than CUDA 12.8."""
        address = driver.batch_copy_address()
        return cls(address) if address else None

    def copy(self, stream: RawStream, batch: CopyBatch, arena: int, slices: Sequence[int], *, to_arena: bool) -> None:
        """Starts to copy; `arena` is the arena's address, `slices` those at which its pinned slices begin."""
        offsets = array.array("Q", [arena + offset for offset in batch.lane_offsets])
        device, host, run = replace(batch, lane_offsets=offsets).fragments()
        sizes = array.array("Q", [run]) * len(device)
        if len(slices) > 1 and bisect_right(slices, min(host)) != bisect_right(slices, max(host) + run - 1):
            device, host, sizes = _cut(device, host, run, slices)
        to, source = (host, device) if to_arena else (device, host)
        status = self._copy(
            to.buffer_info()[0],
            source.buffer_info()[0],
            sizes.buffer_info()[0],
            len(sizes),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._first),
            1,
            ctypes.addressof(self._failed),
            stream,
        )
        check_status(status, "cuMemcpyBatchAsync")


def _cut(
    device: array.array[int], host: array.array[int], run: int, slices: Sequence[int]
) -> tuple[array.array[int], array.array[int], array.array[int]]:
    """No copy may touch two slices that were pinned apart; of a batch hardly ever one would. Returns addresses on the
    device, in the host, and sizes."""
    cut = array.array("Q"), array.array("Q"), array.array("Q")
    for address, there in zip(device, host, strict=True):
        at = 0
        while at < run:
            following = bisect_right(slices, there + at)
            end = run if following == len(slices) else min(run, slices[following] - there)
            for column, value in zip(cut, (address + at, there + at, end - at), strict=True):
                column.append(value)
            at = end
    return cut
