"""`DeviceTensor`: a tensor of a simulated device. Reading and writing goes through the runtime. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvframework.api.layout import MemoryTensor
from kvframework.api.plugin import dtype_bytes

if TYPE_CHECKING:
    from kvf_dev.testing.accelerator.runtime import Accelerator


class DeviceTensor(MemoryTensor):
    """A view of device memory. `strides` are in elements; `dtype` is torch's name of it."""

    def __init__(
        self, runtime: Accelerator, address: int, shape: Sequence[int], strides: Sequence[int] | None, dtype: str
    ) -> None:
        super().__init__(address, shape, dtype, strides, device="simulated")
        self.runtime = runtime

    @classmethod
    def empty(cls, runtime: Accelerator, device: str, shape: Sequence[int], dtype: str) -> DeviceTensor:
        """Return a contiguous tensor in a separate allocation."""
        address = runtime.allocate(device, math.prod(shape) * dtype_bytes(dtype))
        return cls(runtime, address, shape, None, dtype)

    def fill(self, data: bytes) -> None:
        """Write all elements, in row-major order of the axes; blocking."""
        at = 0
        for address, nbytes in self._runs():
            self.runtime.write(address, data[at : at + nbytes])
            at += nbytes

    def content(self) -> bytes:
        """Return all elements in row-major order of the axes; blocking."""
        return b"".join(self.runtime.read(address, nbytes) for address, nbytes in self._runs())

    def _runs(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of each dense run, in row-major order."""
        if list(self.strides) == contiguous(self.shape):
            return [(self.address, self.nbytes)]
        return [run for at in range(self.shape[0]) for run in self.select(0, at)._runs()]

    def _made(self, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> DeviceTensor:
        return DeviceTensor(self.runtime, self.address + offset * self.element_size(), shape, strides, dtype)


def contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
