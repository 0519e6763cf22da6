"""The descriptor of a device's transport: of the vendor's two functions it makes the two sides that the core knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvf_devices.driver import CopierDriver, DeviceOptions, EngineDriver
from kvframework.api.transport import Arena, EngineLink, ServerTransport, TransferContext, TransportProvider
from kvframework.errors import DeviceError

D = TypeVar("D", bound=DeviceOptions)


@dataclass(frozen=True, kw_only=True)
class DeviceTransportProvider(TransportProvider[D]):
    """A server-driven transport of an accelerator. `create_engine(options)` runs in engine processes.
    `create_copier(options, device, arena)` runs in the copier process of one device, which finds it by its name: it is
    a function at the top of a module that can be imported. It raises `DeviceError` for a device that this machine
    lacks. `create` and `create_server` are made of them."""

    create_engine: Callable[[D], EngineDriver[Any]]
    create_copier: Callable[[D, str, Arena], CopierDriver[Any, Any]]
    options: type[D] = DeviceOptions  # type: ignore[assignment]
    is_gpu: bool = True
    create: Callable[[D, EngineLink], TransferContext] = field(init=False, repr=False)
    create_server: Callable[[D, int], ServerTransport] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "create", self._engine_side)
        object.__setattr__(self, "create_server", self._server_side)

    def _engine_side(self, options: D, link: EngineLink) -> TransferContext:
        """Raise `DeviceError` where the device cannot be used."""
        from kvf_devices.endpoints import DeviceTransfer  # here: whatever lists plugins imports this module

        if not link.maps_arena:
            raise DeviceError("the server is on another node")
        return DeviceTransfer(link, self.create_engine(options))

    def _server_side(self, options: D, arena_fd: int) -> ServerTransport:
        """Raise `PluginBroken` if another process cannot find `create_copier`."""
        from kvf_devices.endpoints import DeviceServerTransport
        from kvframework.api.process import NamedCall

        create = NamedCall.of(self.create_copier, options, where=f"transport.{self.name}")
        return DeviceServerTransport(create, arena_fd, stall_s=options.stall_s)
