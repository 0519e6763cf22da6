"""`DeviceTensor`: strided memory of a simulated device with the methods of a tensor that layouts call. No torch.

Only its description is on the host: reading and writing goes through the runtime.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvframework.api.plugin import dtype_bytes

if TYPE_CHECKING:
    from kvf_dev.testing.accelerator.runtime import Accelerator


class DeviceTensor:
    """A view of device memory. `strides` and `offset` are in elements; `dtype` is torch's name of it."""

    def __init__(
        self, runtime: Accelerator, address: int, shape: Sequence[int], strides: Sequence[int], dtype: str
    ) -> None:
        self.runtime = runtime
        self.address = address
        self.shape = tuple(shape)
        self.strides = tuple(strides)
        self.dtype = dtype

    @classmethod
    def empty(cls, runtime: Accelerator, device: str, shape: Sequence[int], dtype: str) -> DeviceTensor:
        """Return a contiguous tensor in an allocation of its own."""
        address = runtime.allocate(device, math.prod(shape) * dtype_bytes(dtype))
        return cls(runtime, address, shape, contiguous(shape), dtype)

    # methods for layouts

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, axis: int | None = None) -> tuple[int, ...] | int:
        return self.strides if axis is None else self.strides[axis]

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return dtype_bytes(self.dtype)

    def numel(self) -> int:
        return math.prod(self.shape)

    def permute(self, axes: Sequence[int]) -> DeviceTensor:
        return self._with([self.shape[axis] for axis in axes], [self.strides[axis] for axis in axes])

    def unsqueeze(self, axis: int) -> DeviceTensor:
        at = axis if axis >= 0 else len(self.shape) + 1 + axis
        return self._with([*self.shape[:at], 1, *self.shape[at:]], [*self.strides[:at], 1, *self.strides[at:]])

    def narrow(self, axis: int, start: int, length: int) -> DeviceTensor:
        shape = [*self.shape[:axis], length, *self.shape[axis + 1 :]]
        return self._with(shape, self.strides, start * self.strides[axis])

    def unflatten(self, axis: int, sizes: Sequence[int]) -> DeviceTensor:
        strides = [each * self.strides[axis] for each in contiguous(sizes)]
        return self._with(
            [*self.shape[:axis], *sizes, *self.shape[axis + 1 :]],
            [*self.strides[:axis], *strides, *self.strides[axis + 1 :]],
        )

    def unbind(self, axis: int = 0) -> tuple[DeviceTensor, ...]:
        shape = [*self.shape[:axis], *self.shape[axis + 1 :]]
        strides = [*self.strides[:axis], *self.strides[axis + 1 :]]
        return tuple(self._with(shape, strides, at * self.strides[axis]) for at in range(self.shape[axis]))

    def as_strided(self, shape: Sequence[int], strides: Sequence[int]) -> DeviceTensor:
        return self._with(shape, strides)

    def view(self, dtype: object) -> DeviceTensor:
        """Return the same bytes as another dtype; the last axis is dense."""
        name = str(dtype).removeprefix("torch.")
        old, new = dtype_bytes(self.dtype), dtype_bytes(name)
        return DeviceTensor(
            self.runtime,
            self.address,
            [*self.shape[:-1], self.shape[-1] * old // new],
            [*(stride * old // new for stride in self.strides[:-1]), 1],
            name,
        )

    # methods for engines

    def fill(self, data: bytes) -> None:
        """Write all elements, in row-major order of the axes; blocking."""
        size = self.element_size()
        for number, (at, length) in enumerate(self._runs()):
            self.runtime.write(self.address + at * size, data[number * length * size : (number + 1) * length * size])

    def content(self) -> bytes:
        """Return all elements in row-major order of the axes; blocking."""
        size = self.element_size()
        return b"".join(self.runtime.read(self.address + at * size, length * size) for at, length in self._runs())

    def _runs(self) -> list[tuple[int, int]]:
        """Return (first element, elements) of each dense run, in row-major order; all of one length."""
        axes = len(self.shape)
        length = 1
        while axes and self.strides[axes - 1] == length:
            axes -= 1
            length *= self.shape[axes]
        starts = [0]
        for size, stride in zip(self.shape[:axes], self.strides[:axes], strict=True):
            starts = [start + at * stride for start in starts for at in range(size)]
        return [(start, length) for start in starts]

    def _with(self, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> DeviceTensor:
        return DeviceTensor(self.runtime, self.address + offset * self.element_size(), shape, strides, self.dtype)


def contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides
