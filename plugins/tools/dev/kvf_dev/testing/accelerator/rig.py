"""The rig of the simulated accelerator: it uses a `SimulatedNode` for the transport kit as an engine would."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvf_dev.testing.accelerator.node import AcceleratorError, SimulatedNode
from kvf_dev.testing.accelerator.runtime import Accelerator
from kvf_dev.testing.accelerator.streams import Stream
from kvf_dev.testing.accelerator.tensor import DeviceTensor, contiguous
from kvf_dev.testing.transport.rig import TransportRig
from kvframework.api.plugin import dtype_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["SimulatedRig"]

LATER_S = 0.2
LEAD_BYTES = 1536


class SimulatedRig(TransportRig):
    """Works on one device of the node to which `runtime` is attached, by default the last one: a driver that always
    takes the first must fail. Owns neither; `transport` copies through it. `options` are for both sides, unless there
    are `server_options`."""

    def __init__(
        self,
        runtime: Accelerator,
        node: str,
        transport: str,
        *,
        plugins: Sequence[str] = (),
        options: Mapping[str, object] | None = None,
        server_options: Mapping[str, object] | None = None,
        device: int = -1,
    ) -> None:
        self.transport = transport
        self.plugins = plugins
        self.engine_options = {"node": node} if options is None else options
        self.server_options = self.engine_options if server_options is None else server_options
        self.device = runtime.devices[device]
        self._runtime = runtime
        self._node = SimulatedNode.attached(node)
        self._held_from = 0
        self._lead = 0
        self._holds_writes = False

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        # Every other one not at the beginning, as with an allocator that cuts parts from a slab; the others follow the
        # end of the one before.
        self._lead = LEAD_BYTES - self._lead
        nbytes = self._lead + math.prod(shape) * dtype_bytes(dtype)
        address = self._runtime.allocate(self.device, nbytes) + self._lead
        return DeviceTensor(self._runtime, address, shape, contiguous(shape), dtype)  # type: ignore[return-value]

    def write(self, tensor: torch.Tensor, data: bytes) -> None:
        self._runtime.compute_stream(self.device).synchronize()
        self._runtime.write(tensor.data_ptr(), data)

    def read(self, tensor: torch.Tensor) -> bytes:
        self._runtime.compute_stream(self.device).synchronize()
        return self._runtime.read(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def write_later(self, tensor: torch.Tensor, data: bytes) -> object:
        stream = self._runtime.compute_stream(self.device)
        stream.hold()
        threading.Timer(LATER_S, self._release_writes).start()
        self._runtime.write(tensor.data_ptr(), data, stream)
        event = self._runtime.create_event(self.device)
        self._runtime.record(event, stream)
        return event

    def stream(self) -> Stream:
        return self._runtime.stream(self.device)

    def read_later(self, tensor: torch.Tensor, stream: object | None) -> Callable[[], bytes | None]:
        target = stream if isinstance(stream, Stream) else self._runtime.default_stream(self.device)
        found = self._runtime.read_later(tensor.data_ptr(), tensor.numel() * tensor.element_size(), target)

        def read() -> bytes | None:
            if target.error:
                raise AcceleratorError(target.error)
            return found[0] if found else None

        return read

    @contextmanager
    def holding_copies(self) -> Iterator[None]:
        self._held_from = self._node.hits("hold")
        self._node.inject("hold", self.device)
        try:
            yield
        finally:
            self._node.release()

    @contextmanager
    def holding_writes(self) -> Iterator[None]:
        self._holds_writes = True
        try:
            yield
        finally:
            self._holds_writes = False
            self._release_writes()

    def fail_copy(self) -> None:
        self._node.inject("copy_fails", self.device)

    def poison(self) -> None:
        self._node.inject("poison", self.device)

    def held(self) -> bool:
        return self._node.hits("hold") > self._held_from

    def problems(self) -> list[str]:
        return [f"{each.kind}: {each.text} (process {each.process})" for each in self._node.violations()]

    def open_elsewhere(self) -> int:
        return self._node.mappings()

    def events(self) -> int:
        return self._node.events()

    def streams(self) -> int:
        return self._node.streams()

    def elsewhere(self) -> TransportRig:
        if len(self._node.devices) < 2:
            raise NotImplementedError("the node has one device")
        at = (self._runtime.devices.index(self.device) + 1) % len(self._runtime.devices)
        other = copy.copy(self)  # of the same class, with the same options
        other.device, other._lead = self._runtime.devices[at], 0
        other._node = SimulatedNode.attached(str(self._node.path))
        return other

    def close(self) -> None:
        self._node.close()

    def _release_writes(self) -> None:
        if not self._holds_writes:
            self._runtime.compute_stream(self.device).release()
