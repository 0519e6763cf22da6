"""Descriptors of transports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvframework.api.driver import Arena, CopierDriver, DeviceOptions, EngineDriver
from kvframework.api.plugin import Diagnose, O, Provider
from kvframework.api.server_transport import ServerTransport
from kvframework.api.transport import EngineLink, TransferContext

D = TypeVar("D", bound=DeviceOptions)


@dataclass(frozen=True, kw_only=True)
class AnyTransportProvider(Provider[O]):
    """What both descriptors of a transport hold. `is_gpu` says whether it moves the memory of an accelerator."""

    kind = "transport"
    is_gpu: bool = False


@dataclass(frozen=True, kw_only=True)
class TransportProvider(AnyTransportProvider[O]):
    """`create` makes the engine half. `create_server(options, arena_fd)` makes the server half, None for an
    engine-driven transport; `arena_fd` is the arena's descriptor, borrowed until the half is closed."""

    create: Callable[[O, EngineLink], TransferContext]
    create_server: Callable[[O, int], ServerTransport] | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceTransportProvider(AnyTransportProvider[D]):
    """A server-driven transport of an accelerator: the vendor gives the two halves of the driver, the core the rest.

    `create_engine(options)` runs in engine processes. `create_copier(options, device, arena)` runs in the copier
    process of one device and makes that device its own; it is found there by its name, so it is a function at the top
    of a module that can be imported. It raises `DeviceError` for a device that is not here. `diagnose` as for
    `TierProvider`, of the devices and their driver.
    """

    create_engine: Callable[[D], EngineDriver]  # type: ignore[type-arg]
    create_copier: Callable[[D, str, Arena], CopierDriver]  # type: ignore[type-arg]
    options: type[D] = DeviceOptions  # type: ignore[assignment]
    is_gpu: bool = True
    diagnose: Diagnose[D] | None = None
