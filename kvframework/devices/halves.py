"""The two halves of any transport: those of a device are made here, of what its vendor gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvframework.api.driver import DeviceOptions, DeviceTransportProvider
from kvframework.api.options import Options
from kvframework.api.server_transport import ServerTransport
from kvframework.api.transport import AnyTransportProvider, EngineLink, TransferContext, TransportProvider
from kvframework.devices.engine_half import DeviceTransfer
from kvframework.devices.server_half import DeviceServerTransport
from kvframework.errors import DeviceError, PluginWrongKind


def engine_half(provider: AnyTransportProvider[Any], options: Options, link: EngineLink) -> TransferContext:
    """The half in an engine process. Raises `DeviceError` where its device cannot be used, and what the plugin's
    function raises."""
    if isinstance(provider, DeviceTransportProvider):
        if not link.maps_arena:
            raise DeviceError("the server is on another node")
        return DeviceTransfer(link, provider.create_engine(options))
    if isinstance(provider, TransportProvider):
        return provider.create(options, link)
    raise PluginWrongKind(f"transport.{provider.name} is no transport here")


def server_half(
    provider: AnyTransportProvider[Any],
    options: Options,
    arena_fd: int,
    create: Callable[[Callable[[Any, int], ServerTransport]], ServerTransport],
) -> ServerTransport | None:
    """The half in the server, None for an engine-driven transport. `create` calls the plugin's function. Raises
    `PluginBroken`."""
    if isinstance(provider, DeviceTransportProvider):
        assert isinstance(options, DeviceOptions)  # the provider's own type
        return DeviceServerTransport(provider, options, arena_fd)
    if isinstance(provider, TransportProvider) and provider.create_server is not None:
        return create(provider.create_server)
    return None
