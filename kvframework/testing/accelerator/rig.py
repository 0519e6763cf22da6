"""Owns the rig of the simulated accelerator: how the transport kit uses a `SimulatedNode` as an engine would."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvframework.testing.accelerator.node import SimulatedNode
from kvframework.testing.accelerator.runtime import Accelerator
from kvframework.testing.accelerator.streams import Event
from kvframework.testing.accelerator.tensor import DeviceTensor
from kvframework.testing.transport.rig import TransportRig

if TYPE_CHECKING:
    import torch

LATER_S = 0.2


class SimulatedRig(TransportRig):
    """Works on one device of the node that `runtime` is attached to. Owns neither; `transport` copies through it."""

    def __init__(
        self,
        runtime: Accelerator,
        node: str,
        transport: str,
        *,
        plugins: Sequence[str] = (),
        options: Mapping[str, object] | None = None,
        device: int = 0,
    ) -> None:
        self.transport = transport
        self.plugins = plugins
        self.engine_options = self.server_options = {"node": node} if options is None else options
        self.device = runtime.devices[device]
        self._runtime = runtime
        self._node = SimulatedNode.attached(node)
        self._held_from = 0

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return DeviceTensor.empty(self._runtime, self.device, shape, dtype)  # type: ignore[return-value]

    def write(self, tensor: torch.Tensor, data: bytes) -> None:
        self._runtime.compute_stream(self.device).synchronize()
        self._runtime.write(tensor.data_ptr(), data)

    def read(self, tensor: torch.Tensor) -> bytes:
        self._runtime.compute_stream(self.device).synchronize()
        return self._runtime.read(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def write_later(self, tensor: torch.Tensor, data: bytes) -> Event:
        stream = self._runtime.compute_stream(self.device)
        stream.hold()
        threading.Timer(LATER_S, stream.release).start()
        self._runtime.write(tensor.data_ptr(), data, stream)
        event = self._runtime.create_event(self.device)
        self._runtime.record(event, stream)
        return event

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

    def problems(self) -> list[str]:
        return [f"{each.kind}: {each.text} (process {each.process})" for each in self._node.violations()]

    def open_elsewhere(self) -> int:
        return self._node.mappings()

    def close(self) -> None:
        self._node.close()
