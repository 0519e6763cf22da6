"""The rig of the simulated accelerator: it uses a `SimulatedNode` for the transport kit as an engine would."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvf_dev.testing.accelerator.node import AcceleratorError, SimulatedNode
from kvf_dev.testing.accelerator.runtime import Accelerator, Stream
from kvf_dev.testing.accelerator.tensor import DeviceTensor
from kvf_dev.testing.transport.rig import TransportRig, nbytes_of
from kvframework.api.layout import TensorLike
from kvframework.api.plugin import dtype_bytes

__all__ = ["SimulatedRig"]

LATER_S = 0.2
LEAD_BYTES = 1536


class SimulatedRig(TransportRig):
    """Works on one device of the node to which `runtime` is attached, by default the last one: a driver that always
    takes the first must fail. Owns neither; `transport` copies through it. `options` are for both sides."""

    def __init__(
        self,
        runtime: Accelerator,
        node: str,
        transport: str,
        *,
        plugins: Sequence[str] = (),
        options: Mapping[str, object] | None = None,
        device: int = -1,
    ) -> None:
        self.transport = transport
        self.plugins = plugins
        self.engine_options = self.server_options = {"node": node} if options is None else options
        self.device = runtime.devices[device]
        self._runtime = runtime
        self._node = SimulatedNode.attached(node)
        self._slow = Stream(runtime, self.device)
        self._held_from = 0
        self._lead = 0
        self._gates: list[threading.Event] | None = None

    def empty(self, shape: Sequence[int], dtype: str) -> TensorLike:
        # Every other one not at the beginning, as with an allocator that cuts parts from a slab; the others follow the
        # end of the one before.
        self._lead = LEAD_BYTES - self._lead
        nbytes = self._lead + math.prod(shape) * dtype_bytes(dtype)
        address = self._runtime.allocate(self.device, nbytes) + self._lead
        return DeviceTensor(self._runtime, address, shape, None, dtype)

    def write(self, tensor: TensorLike, data: bytes) -> None:
        self._slow.synchronize()
        self._runtime.write(tensor.data_ptr(), data)

    def read(self, tensor: TensorLike) -> bytes:
        self._slow.synchronize()
        return self._runtime.read(tensor.data_ptr(), nbytes_of(tensor))

    def write_later(self, tensor: TensorLike, data: bytes) -> object:
        gate = threading.Event()
        self._slow.add(gate.wait)
        if self._gates is None:
            threading.Timer(LATER_S, gate.set).start()
        else:
            self._gates.append(gate)
        self._runtime.write(tensor.data_ptr(), data, self._slow)
        event = self._runtime.create_event(self.device)
        self._runtime.record(event, self._slow)
        return event

    @contextmanager
    def holding_writes(self) -> Iterator[None]:
        self._gates = []
        try:
            yield
        finally:
            for gate in self._gates:
                gate.set()
            self._gates = None

    def stream(self) -> Stream:
        return self._runtime.stream(self.device)

    def read_later(self, tensor: TensorLike, stream: object | None) -> Callable[[], bytes | None]:
        target = stream if isinstance(stream, Stream) else self._runtime.default_stream(self.device)
        found = self._runtime.read_later(tensor.data_ptr(), nbytes_of(tensor), target)

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

    def held(self) -> bool:
        return self._node.hits("hold") > self._held_from

    def fail_copy(self) -> None:
        self._node.inject("copy_fails", self.device)

    def poison(self) -> None:
        self._node.inject("poison", self.device)

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
            return super().elsewhere()
        other = copy.copy(self)  # of the same class, with the same options
        other.device = next(device for device in self._node.devices if device != self.device)
        other._slow = Stream(self._runtime, other.device)
        return other

    def close(self) -> None:
        self._node.close()
