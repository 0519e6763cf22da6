"""A GPU as an engine uses it: memory, a slow stream of work, reads and writes. It uses cuda-bindings alone, so that it
behaves the same on a real driver and on the simulated one. Thread-safe."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver as cu

_NO_TIMING = 2
_NON_BLOCKING = 1
_PORTABLE_AND_MAPPED = 3
_GEQ = 0
_POLL_S = 0.0002
# Allocated at once: an allocation might wait for work that is held back.
_PINNED_BYTES = 8 << 20


class CudaError(RuntimeError):
    """A failed call: its name, and the driver's name of the error."""


def call(function: Callable[..., Any], *arguments: object) -> Any:
    """Return the call's one value, a tuple of several, or None. Raises `CudaError`."""
    status, *values = function(*arguments)
    if status:
        raise CudaError(f"{function.__name__}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


class CudaDevice:
    """The device `ordinal` in this process, in its primary context; a negative number counts from the last. It is the
    runtime of a `DeviceTensor`."""

    def __init__(self, ordinal: int = 0) -> None:
        call(cu.cuInit, 0)
        count = call(cu.cuDeviceGetCount)
        self._device = call(cu.cuDeviceGet, ordinal % count)
        self._context = call(cu.cuDevicePrimaryCtxRetain, self._device)
        self._allocated: list[int] = []
        self._events: list[Any] = []
        self._streams: list[int] = []
        self._work = self.new_stream()
        with self.current():
            self._pinned = int(call(cu.cuMemHostAlloc, _PINNED_BYTES, _PORTABLE_AND_MAPPED))
            self._gate_on_device = int(call(cu.cuMemHostGetDevicePointer, self._pinned, 0))
        self._pinned_used = 0
        self._gate = ctypes.c_uint32.from_address(self._staging(4))
        self._gate.value = 0
        self._held = 0

    @contextmanager
    def current(self) -> Iterator[None]:
        call(cu.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            call(cu.cuCtxPopCurrent)

    def allocate(self, nbytes: int) -> int:
        with self.current():
            address = int(call(cu.cuMemAlloc, nbytes))
        self._allocated.append(address)
        return address

    def write(self, address: int, data: bytes) -> None:
        self.finish(0)
        with self.current():
            call(cu.cuMemcpyHtoD, address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        self.finish(0)
        found = bytearray(nbytes)
        with self.current():
            call(cu.cuMemcpyDtoH, found, address, nbytes)
        return bytes(found)

    def new_stream(self) -> int:
        with self.current():
            self._streams.append(int(call(cu.cuStreamCreate, _NON_BLOCKING)))
        return self._streams[-1]

    def finish_work(self) -> None:
        self.finish(self._work)

    def finish(self, stream: int, timeout: float = 20.0) -> None:
        """Wait until the stream is idle. Raises `CudaError` after a timeout; the driver's own call would wait for
        ever."""
        deadline = time.monotonic() + timeout
        with self.current():
            while (status := cu.cuStreamQuery(stream)[0]) == cu.CUresult.CUDA_ERROR_NOT_READY:
                if time.monotonic() > deadline:
                    raise CudaError(f"stream {stream:#x} has not come to its end within {timeout} s")
                time.sleep(_POLL_S)
        if status:
            raise CudaError(f"cuStreamQuery: {status.name}")

    def write_later(self, address: int, data: bytes) -> int:
        """Queue a write that waits for `let_go`; return the event behind it."""
        staging = self._staging(len(data))
        ctypes.memmove(staging, data, len(data))
        with self.current():
            self._held += 1
            call(cu.cuStreamWaitValue32, self._work, self._gate_on_device, self._held, _GEQ)
            call(cu.cuMemcpyHtoDAsync, address, staging, len(data), self._work)
            event = call(cu.cuEventCreate, _NO_TIMING)
            call(cu.cuEventRecord, event, self._work)
        self._events.append(event)
        return int(event)

    def let_go(self) -> None:
        self._gate.value = self._held

    def read_later(self, address: int, nbytes: int, stream: int) -> Callable[[], bytes | None]:
        """Queue a read; return a function that gives the bytes once they are there, None before."""
        staging = self._staging(nbytes)
        with self.current():
            event = call(cu.cuEventCreate, _NO_TIMING)
            call(cu.cuMemcpyDtoHAsync, staging, address, nbytes, stream)
            call(cu.cuEventRecord, event, stream)
        self._events.append(event)

        def read() -> bytes | None:
            with self.current():
                (status,) = cu.cuEventQuery(event)
            if status == cu.CUresult.CUDA_ERROR_NOT_READY:
                return None
            if status:
                raise CudaError(f"cuEventQuery: {status.name}")
            return ctypes.string_at(staging, nbytes)

        return read

    def close(self) -> None:
        """Free everything. Idempotent; borrowers of its memory must have closed it. Raises `CudaError`, with nothing
        freed, if a stream does not become idle."""
        if self._pinned:
            self.let_go()
            for stream in (0, *self._streams):
                self.finish(stream, timeout=5.0)
            with self.current():
                for event in self._events:
                    call(cu.cuEventDestroy, event)
                for address in self._allocated:
                    call(cu.cuMemFree, address)
                call(cu.cuMemFreeHost, self._pinned)
                for stream in self._streams:
                    call(cu.cuStreamDestroy, stream)
            self._allocated, self._events, self._streams, self._pinned = [], [], [], 0
            call(cu.cuDevicePrimaryCtxRelease, self._device)

    def _staging(self, nbytes: int) -> int:
        at = self._pinned_used
        self._pinned_used += -(-nbytes // 64) * 64
        assert self._pinned_used <= _PINNED_BYTES, "so much is read and written later that the pinned memory is used up"
        return self._pinned + at
