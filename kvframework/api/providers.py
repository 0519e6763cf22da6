"""Descriptors of transports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvframework.api.driver import Arena, CopierDriver, DeviceOptions, EngineDriver
from kvframework.api.plugin import Diagnose, O, Provider
from kvframework.api.transport import EngineLink, ServerTransport, TransferContext
from kvframework.errors import PluginBroken

D = TypeVar("D", bound=DeviceOptions)


@dataclass(frozen=True, kw_only=True)
class TransportProvider(Provider[O]):
    """`create` makes the engine half; `create_server` the server half, None for an engine-driven transport."""

    kind = "transport"
    create: Callable[[O, EngineLink], TransferContext]
    create_server: Callable[[O], ServerTransport] | None = None
    is_gpu: bool = False


def _made_by_the_core(_options: object, _link: EngineLink) -> TransferContext:
    raise PluginBroken("a device transport's halves are made by the core", hint="use create_engine and create_copier")


@dataclass(frozen=True, kw_only=True)
class DeviceTransportProvider(TransportProvider[D]):
    """A server-driven transport of an accelerator: the vendor gives the two halves of the driver, the core the rest.

    `create_engine(options)` runs in engine processes. `create_copier(options, device, arena)` runs in the copier
    process of one device and makes that device its own; it is found there by its name, so it is a function at the top
    of a module that can be imported. It raises `DeviceError` for a device that is not here. `diagnose` as for
    `TierProvider`, of the devices and their driver.
    """

    create: Callable[[D, EngineLink], TransferContext] = field(default=_made_by_the_core, repr=False)
    create_engine: Callable[[D], EngineDriver]  # type: ignore[type-arg]
    create_copier: Callable[[D, str, Arena], CopierDriver]  # type: ignore[type-arg]
    options: type[D] = DeviceOptions  # type: ignore[assignment]
    is_gpu: bool = True
    diagnose: Diagnose[D] | None = None
