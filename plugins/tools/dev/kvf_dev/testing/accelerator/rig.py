"""The rig of the simulated accelerator: it uses a `SimulatedNode` for the transport kit as an engine would."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvf_dev.testing.accelerator.node import SimulatedNode
from kvf_dev.testing.accelerator.runtime import Accelerator, DeviceTensor, Event, Stream
from kvf_dev.testing.transport.rig import DeviceRig, TransportRig
from kvframework.api.layout import TensorLike
from kvframework.api.plugin import dtype_bytes

__all__ = ["SimulatedRig"]

LEAD_BYTES = 1536


class SimulatedRig(DeviceRig):
    """Works on one device of the node to which `runtime` is attached, by default the last one: a driver that always
    takes the first must fail. Owns neither; `transport` copies through it, in any process: the node holds its copies.
    `options` are for both sides."""

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
        super().__init__(transport, node, {"node": node} if options is None else options)
        self.plugins = plugins
        self.device = runtime.devices[device]
        self._runtime = runtime
        self._node = SimulatedNode.attached(node)
        self._held_from = self._lead = 0

    def empty(self, shape: Sequence[int], dtype: str) -> TensorLike:
        # Every other one not at the beginning, as with an allocator that cuts parts from a slab.
        self._lead = LEAD_BYTES - self._lead
        nbytes = self._lead + math.prod(shape) * dtype_bytes(dtype)
        address = self._runtime.allocate(self.device, nbytes) + self._lead
        return DeviceTensor(self._runtime, address, shape, None, dtype)

    def queue(self, address: int, host: memoryview, stream: object | None, *, to_device: bool) -> Event:
        target = self._stream(stream)
        if to_device:
            self._runtime.write(address, bytes(host), target)
        else:
            self._runtime.read_into(host, address, target)
        event = self._runtime.create_event(self.device)
        self._runtime.record(event, target)
        return event

    def reached(self, event: object) -> bool:
        assert isinstance(event, Event)
        return self._runtime.reached(event)

    def hold(self, stream: object | None) -> Callable[[], None]:
        return self._runtime.hold(self._stream(stream))

    def new_stream(self) -> Stream:
        return self._runtime.stream(self.device)

    def _stream(self, stream: object | None) -> Stream:
        return stream if isinstance(stream, Stream) else self._runtime.default_stream(self.device)

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

    @contextmanager
    def without_device(self) -> Iterator[None]:
        self._node.vanish(self.device)
        try:
            yield
        finally:
            self._node.vanish(self.device, back=True)

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
        other._late, other._queued = None, []
        return other

    def close(self) -> None:
        super().close()
        self._node.close()
