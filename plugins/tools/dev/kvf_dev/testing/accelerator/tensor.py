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
    """A view of device memory. `strides` are in elements; `dtype` is torch's name of it."""

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
        """Return a contiguous tensor in a separate allocation."""
        address = runtime.allocate(device, math.prod(shape) * dtype_bytes(dtype))
        return cls(runtime, address, shape, contiguous(shape), dtype)

    def dim(self) -> int:
        """As `torch.Tensor.dim`."""
        return len(self.shape)

    def stride(self, axis: int | None = None) -> tuple[int, ...] | int:
        """As `torch.Tensor.stride`."""
        return self.strides if axis is None else self.strides[axis]

    def data_ptr(self) -> int:
        """As `torch.Tensor.data_ptr`."""
        return self.address

    def element_size(self) -> int:
        """As `torch.Tensor.element_size`."""
        return dtype_bytes(self.dtype)

    def numel(self) -> int:
        """As `torch.Tensor.numel`."""
        return math.prod(self.shape)

    def permute(self, axes: Sequence[int]) -> DeviceTensor:
        """As `torch.Tensor.permute`."""
        return self.as_strided([self.shape[axis] for axis in axes], [self.strides[axis] for axis in axes])

    def unsqueeze(self, axis: int) -> DeviceTensor:
        """As `torch.Tensor.unsqueeze`."""
        at = axis if axis >= 0 else len(self.shape) + 1 + axis
        return self.as_strided(_replaced(self.shape, at, [1], drop=0), _replaced(self.strides, at, [1], drop=0))

    def narrow(self, axis: int, start: int, length: int) -> DeviceTensor:
        """As `torch.Tensor.narrow`."""
        return self.as_strided(_replaced(self.shape, axis, [length]), self.strides, start * self.strides[axis])

    def unflatten(self, axis: int, sizes: Sequence[int]) -> DeviceTensor:
        """As `torch.Tensor.unflatten`."""
        strides = [each * self.strides[axis] for each in contiguous(sizes)]
        return self.as_strided(_replaced(self.shape, axis, sizes), _replaced(self.strides, axis, strides))

    def unbind(self, axis: int = 0) -> tuple[DeviceTensor, ...]:
        """As `torch.Tensor.unbind`."""
        shape, strides = _replaced(self.shape, axis, []), _replaced(self.strides, axis, [])
        return tuple(self.as_strided(shape, strides, at * self.strides[axis]) for at in range(self.shape[axis]))

    def as_strided(self, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> DeviceTensor:
        """Return another view of the memory, from `offset` elements behind the beginning of this one."""
        return DeviceTensor(self.runtime, self.address + offset * self.element_size(), shape, strides, self.dtype)

    def view(self, dtype: object) -> DeviceTensor:
        """Return the same bytes as another dtype; the last axis is dense."""
        name = str(dtype).removeprefix("torch.")
        old, new = dtype_bytes(self.dtype), dtype_bytes(name)
        shape = [*self.shape[:-1], self.shape[-1] * old // new]
        strides = [*(stride * old // new for stride in self.strides[:-1]), 1]
        return DeviceTensor(self.runtime, self.address, shape, strides, name)

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
            return [(self.address, self.numel() * self.element_size())]
        return [run for part in self.unbind() for run in part._runs()]


def contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _replaced(values: Sequence[int], at: int, by: Sequence[int], drop: int = 1) -> list[int]:
    return [*values[:at], *by, *values[at + drop :]]
