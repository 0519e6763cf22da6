"""Copies by the GPU's copy engines: all fragments of a batch in one call of `cuMemcpyBatchAsync`. In the copier.

Format of the attributes: cuda.h of CUDA 12.8, `CUmemcpyAttributes`. The driver reads the columns during the call.

The proof that a way of copying copies: a few bytes to the GPU and back, compared. In the copier, at its start.

What the driver does with addresses, formats and machine code is known only once it has run. A way that fails here is
not used; none may make wrong bytes of an engine's.
"""

from __future__ import annotations

import array
import ctypes
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvf_cuda_ipc.driver import Driver, RawStream, check_status
from kvframework.api.copy_plans import CopyBatch, Step
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


# Starts a copy: stream, batch, the address of the host memory here, what to add to it on the device, and `to_arena`.
Copy = Callable[[RawStream, CopyBatch, int, int | None, bool], None]

_NBYTES = 8192
_PATIENCE_S = 5.0
_RUNS = (1, 2, 4, 8, 16, 48)


def prove(driver: Driver, copy: Copy) -> None:
    """Copy with runs of each alignment, scattered, to the current device and back. Raises `DeviceError` if it fails,
    takes `_PATIENCE_S`, or the bytes are others; its memory is then kept, since a copy may still write to it. Blocking,
    some milliseconds."""
    host, on_device = driver.allocate_host(2 * _NBYTES)
    further = None if on_device is None else on_device - host
    gpu, stream, event = driver.allocate(_NBYTES), driver.create_stream(0), driver.create_event(interprocess=False)
    sent, back = ((ctypes.c_ubyte * _NBYTES).from_address(host + at) for at in (0, _NBYTES))
    ctypes.memmove(sent, os.urandom(_NBYTES), _NBYTES)
    expected = bytearray(_NBYTES)
    ctypes.memset(back, 0, _NBYTES)
    for batch in _batches(gpu):
        copy(stream, batch, host, further, False)
        copy(stream, batch, host + _NBYTES, further, True)
        _, offsets, run = batch.fragments()
        for offset in offsets:
            expected[offset : offset + run] = sent[offset : offset + run]
    driver.record(event, stream)
    deadline = time.monotonic() + _PATIENCE_S
    while not driver.reached(event):
        if time.monotonic() > deadline:
            raise DeviceError(f"a copy of a few bytes has not ended within {_PATIENCE_S:g} s", where="cuda_ipc")
        time.sleep(0.0005)
    wrong = bytes(back) != bytes(expected)
    del sent, back
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    driver.free(gpu)
    driver.free_host(host)
    if wrong:
        raise DeviceError("bytes changed when they were copied to the GPU and back", where="cuda_ipc")


def _batches(gpu: int) -> Iterator[CopyBatch]:
    """Lanes x places x a step, each batch in a part of the memory of its own: places in another order on the device."""
    at = 0
    for run in _RUNS:
        places = [0, 1, 2, 3, 4]
        shuffled = [places[(3 * place + 1) % len(places)] for place in places]
        cell = 3 * run  # two steps, and a gap that stays as it is
        yield CopyBatch(
            lane_addresses=array.array("Q", [gpu + at, gpu + at + len(places) * cell]),
            lane_offsets=array.array("Q", [at + len(places) * cell, at]),
            place_addresses=array.array("Q", [place * cell for place in shuffled]),
            place_offsets=array.array("Q", [place * cell for place in places]),
            steps=(Step(2, run, run),),
            run=run,
        )
        at += -(-2 * len(places) * cell // 16) * 16
