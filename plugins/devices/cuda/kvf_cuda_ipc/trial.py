"""The proof that a way of copying copies: a few bytes to the GPU and back, compared. In the copier, at its start.

What the driver does with addresses, formats and machine code is known only once it has run. A way that fails here is
not used; none may make wrong bytes of an engine's.
"""

from __future__ import annotations

import array
import ctypes
import os
import time
from collections.abc import Callable, Iterator

from kvf_cuda_ipc.driver import Driver, RawStream
from kvframework.api.copy_plans import CopyBatch, Step
from kvframework.errors import DeviceError

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
