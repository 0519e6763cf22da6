"""`TensorLike`: what layouts and transports ask of an engine's tensors, and a class that answers it for memory at an
address. Pure, without torch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

from kvframework.api.plugin import dtype_bytes
from kvframework.errors import BadLayout

__all__ = ["MemoryTensor", "TensorLike", "dtype_name"]

T = TypeVar("T", bound="MemoryTensor")


class TensorLike(Protocol):
    """Strided memory, in torch's spelling: a `torch.Tensor` is one. An engine with another library passes a
    `MemoryTensor` for each of its arrays. `dtype` is anything whose text is torch's name of it, see `dtype_name`;
    `device` is the engine's name of the device, on which `data_ptr` is the address of the first element. Strides are in
    elements. The last three methods return views of the same memory; `as_strided` one with the same first element.
    There is no access to contents: only the device's own calls read its memory; the host's: `MemoryTensor.contents`."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...
    @property
    def device(self) -> object: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def as_strided(self, shape: Sequence[int], strides: Sequence[int], /) -> TensorLike: ...
    def select(self, axis: int, index: int, /) -> TensorLike: ...
    def narrow(self, axis: int, start: int, length: int, /) -> TensorLike: ...


def dtype_name(tensor: TensorLike) -> str:
    """Return torch's name of the tensor's dtype, without `torch.`: "float16"."""
    return str(tensor.dtype).removeprefix("torch.")


class MemoryTensor:
    """A `TensorLike` over the memory at `address`, of the host or of a device, which it never touches. Without
    `strides` the memory is contiguous. `owner` is what keeps the memory alive: the tensor and its views refer to it.
    Raises `BadDtype` for a dtype that no layout can declare."""

    def __init__(
        self,
        address: int,
        shape: Sequence[int],
        dtype: str,
        strides: Sequence[int] | None = None,
        *,
        device: str = "cpu",
        owner: object = None,
    ) -> None:
        self.address, self.dtype, self.device, self.owner = address, dtype, device, owner
        self.shape = tuple(shape)
        dense = (math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
        self.strides = tuple(dense if strides is None else strides)
        self.nbytes = math.prod(self.shape) * dtype_bytes(dtype)

    def contents(self) -> memoryview:
        """Return the bytes of a contiguous tensor in memory that the host can address (any other crashes the process):
        writable, format `B`. The view keeps `owner`. Raises `BadLayout` if the tensor has gaps or another order."""
        if self.strides != MemoryTensor(self.address, self.shape, self.dtype).strides:
            raise BadLayout(f"a tensor with strides {self.strides} is not contiguous", where="MemoryTensor")
        memory = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        memory.owner = self.owner  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return self.address

    def stride(self) -> tuple[int, ...]:
        """Return the strides in elements."""
        return self.strides

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return dtype_bytes(self.dtype)

    def as_strided(self: T, shape: Sequence[int], strides: Sequence[int], /) -> T:
        """Return the view of this shape, from the same first element on."""
        return self._made(0, shape, strides, self.dtype)

    def select(self: T, axis: int, index: int, /) -> T:
        """Return the view without `axis`, at one of its indices."""
        shape, strides = (each[:axis] + each[axis + 1 :] for each in (self.shape, self.strides))
        return self._made(index * self.strides[axis], shape, strides, self.dtype)

    def narrow(self: T, axis: int, start: int, length: int, /) -> T:
        """Return the view with `length` indices of `axis`, from `start` on."""
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return self._made(start * self.strides[axis], shape, self.strides, self.dtype)

    def view(self: T, dtype: str, /) -> T:
        """Return the same bytes as another dtype; the last axis is contiguous."""
        old, new = self.element_size(), dtype_bytes(dtype)
        strides = [*(each * old // new for each in self.strides[:-1]), 1]
        return self._made(0, [*self.shape[:-1], self.shape[-1] * old // new], strides, dtype)

    def _made(self: T, offset: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> T:
        address = self.address + offset * self.element_size()
        return type(self)(address, shape, dtype, strides, device=self.device, owner=self.owner)
