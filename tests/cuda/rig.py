"""The rig of `cuda_ipc`: the transport kit's use of a GPU as an engine would use it, real or simulated."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import pytest

from kvf_dev.testing.accelerator.runtime import DeviceTensor, contiguous
from kvf_dev.testing.transport.rig import TransportRig
from kvframework.api.plugin import dtype_bytes
from tests.cuda.node import CudaNode

if TYPE_CHECKING:
    import torch

    from tests.cuda.device import CudaDevice

LATER_S = 0.2
LEAD_BYTES = 1280


def make(**options: object) -> CudaRig:
    """Make a rig on the first real GPU; `options` are the server's for the transport."""
    return CudaRig(None, options, device=0)


def make_simulated(node: str, device: int = -1, **options: object) -> CudaRig:
    """Make a rig on a GPU of a simulated node, by default the last that this process sees: a driver that takes the
    first must not pass."""
    return CudaRig(CudaNode.attached(node), options, device)


class CudaRig(TransportRig):
    """The rig of `cuda_ipc`. Without a `node`, what takes the simulated driver skips the test, or is 0."""

    transport = "cuda_ipc"

    def __init__(self, node: CudaNode | None, options: Mapping[str, object], device: int) -> None:
        self.server_options = options
        self._node = node
        self._ordinal = device
        self._held_from = 0
        self._holds_writes = False
        self._timers: list[threading.Timer] = []

    @cached_property
    def _gpu(self) -> CudaDevice:
        """Created on first use: a server has a rig, too, and uses no GPU."""
        from tests.cuda.device import CudaDevice

        return CudaDevice(self._ordinal)

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        # Not at the beginning: the place lies within an allocation, as with an allocator that splits slabs.
        address = self._gpu.allocate(LEAD_BYTES + math.prod(shape) * dtype_bytes(dtype)) + LEAD_BYTES
        return DeviceTensor(self._gpu, address, shape, contiguous(shape), dtype)  # type: ignore[arg-type, return-value]

    def write(self, tensor: torch.Tensor, data: bytes) -> None:
        self._gpu.finish_work()
        self._gpu.write(tensor.data_ptr(), data)

    def read(self, tensor: torch.Tensor) -> bytes:
        self._gpu.finish_work()
        return self._gpu.read(tensor.data_ptr(), _nbytes(tensor))

    def write_later(self, tensor: torch.Tensor, data: bytes) -> object:
        self._timers = [each for each in self._timers if each.is_alive()] + [
            threading.Timer(LATER_S, self._release_writes)
        ]
        self._timers[-1].start()
        return self._gpu.write_later(tensor.data_ptr(), data)

    def stream(self) -> object:
        return self._gpu.new_stream()

    def read_later(self, tensor: torch.Tensor, stream: object | None) -> Callable[[], bytes | None]:
        target = stream if isinstance(stream, int) else 0
        return self._gpu.read_later(tensor.data_ptr(), _nbytes(tensor), target)

    @contextmanager
    def holding_writes(self) -> Iterator[None]:
        self._holds_writes = True
        try:
            yield
        finally:
            self._holds_writes = False
            self._release_writes()

    @contextmanager
    def holding_copies(self) -> Iterator[None]:
        node = self._simulated("copies cannot be held")
        self._held_from = node.hits("hold")
        node.inject("hold", self._device)
        try:
            yield
        finally:
            node.release()

    def held(self) -> bool:
        return self._node is not None and self._node.hits("hold") > self._held_from

    def fail_copy(self) -> None:
        self._simulated("copies cannot be made to fail").inject("copy_fails", self._device)

    def poison(self) -> None:
        self._simulated("contexts cannot be poisoned").inject("poison", self._device)

    def problems(self) -> list[str]:
        if self._node is None:
            return []
        return [f"{each.kind}: {each.text} (process {each.process})" for each in self._node.violations()]

    def open_elsewhere(self) -> int:
        return 0 if self._node is None else self._node.mappings()

    def events(self) -> int:
        return 0 if self._node is None else self._node.events()

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
            timer.join()
        if "_gpu" in self.__dict__:
            self._gpu.close()
        if self._node is not None:
            self._node.close()

    @property
    def _device(self) -> str:
        return self._node.devices[self._ordinal]

    def _simulated(self, why_not: str) -> CudaNode:
        if self._node is None:
            pytest.skip(f"a real GPU's {why_not}")
        return self._node

    def _release_writes(self) -> None:
        if not self._holds_writes:
            self._gpu.let_go()


def _nbytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
