"""Copies by the GPU's copy engines: all fragments of a batch in one call of `cuMemcpyBatchAsync`. In the copier.

Format of the attributes: cuda.h of CUDA 12.8, `CUmemcpyAttributes`. The driver reads the columns during the call.
"""

from __future__ import annotations

import array
import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from kvf_cuda_ipc.driver import Driver, RawStream, check_status
from kvf_cuda_ipc.trial import prove
from kvframework.api.copy_plans import CopyBatch
from kvframework.errors import DeviceError, DeviceLost

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Attributes(ctypes.Structure):
    """The attributes of a copy. The hints are empty: they are for managed memory."""

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
    """The batched copies of one driver. `address` is that of the driver's call. Never blocks."""

    def __init__(self, address: int) -> None:
        self._copy = _CALL(address)
        self._attributes = _Attributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE)
        self._first = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)

    @classmethod
    def of(cls, driver: Driver) -> BatchedCopies:
        """Return those of the current context, proven by a trial. Raises `DeviceError` where the driver is older than
        CUDA 12.8 or the trial fails."""
        address = driver.batch_copy_address()
        if not address:
            raise DeviceError(
                "the driver has no batched copies", where="cuda_ipc", hint="install a driver of CUDA 12.8 or later"
            )
        made = cls(address)
        try:
            prove(driver, made._try)
        except DeviceLost:
            raise
        except DeviceError:
            if not made._attributes.flags:
                raise
            # The flag asks for speed only: without it the copies are the same.
            made._attributes.flags = 0
            prove(driver, made._try)
        return made

    def _try(self, stream: RawStream, batch: CopyBatch, here: int, _further: int | None, to_arena: bool) -> None:
        self.copy(stream, batch, here, (), to_arena=to_arena)

    def copy(self, stream: RawStream, batch: CopyBatch, arena: int, slices: Sequence[int], *, to_arena: bool) -> None:
        """Start a copy; `arena` is the arena's address, `slices` the addresses at which its pinned slices begin."""
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
    """Cut the copies at the bounds of pinned slices, since none may touch two that were pinned apart; hardly ever does
    one. Returns addresses on the device, in the host, and sizes."""
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
