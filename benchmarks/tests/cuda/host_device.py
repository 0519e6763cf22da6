"""A device that is plain host memory: for the parts of the bench above the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvframework_bench.cuda.device import Device, PinnedMemory


class HostDevice(Device):
    """Copies at once. `allocated` is the memory that was not freed."""

    def __init__(self, free: int = 1 << 40) -> None:
        self.allocated = 0
        self._free = free

    def __exit__(self, *_exc: object) -> None:
        return

    def free_bytes(self) -> int:
        return self._free

    @contextmanager
    def memory(self, nbytes: int) -> Iterator[int]:
        with self.pinned(nbytes) as memory:
            yield memory.address

    @contextmanager
    def pinned(self, nbytes: int) -> Iterator[PinnedMemory]:
        buffer = (ctypes.c_ubyte * nbytes)()
        self.allocated += nbytes
        try:
            yield PinnedMemory(ctypes.addressof(buffer), memoryview(buffer).cast("B"))
        finally:
            self.allocated -= nbytes

    def stream(self) -> Any:
        return 1

    def to_host(self, host: int, device: int, nbytes: int, stream: Any) -> None:
        ctypes.memmove(host, device, nbytes)

    def to_device(self, device: int, host: int, nbytes: int, stream: Any) -> None:
        ctypes.memmove(device, host, nbytes)

    def fill(self, device: int, byte: int, nbytes: int) -> None:
        ctypes.memset(device, byte, nbytes)

    def synchronize(self, stream: Any = None) -> None:
        return
