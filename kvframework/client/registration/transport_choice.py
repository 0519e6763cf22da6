"""The choice of an instance's transport. In the engine's thread, at its first registration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from kvframework.api.transport import AnyTransportProvider, TransferContext
from kvframework.devices.halves import engine_half
from kvframework.errors import BadLayout, DeviceError, KVFrameworkError, PluginError, TransportMismatch

if TYPE_CHECKING:
    from kvframework.client.connection import KVClient

log = logging.getLogger(__name__)

AUTO = "auto"


def choose_transport(
    client: KVClient,
    wanted: str,
    options: Mapping[str, object],
    *,
    register: Callable[[str, TransferContext], None],
    where: str,
) -> None:
    """Register with the first transport that both sides have, in the server's order, and that accepts the engine's
    memory; or with the one `wanted` by name.

    `register` raises `DeviceError`, `BadLayout` or `TransportMismatch` where a transport cannot move the engine's
    memory, or the server cannot open it. For a transport chosen by name the error is raised; "auto" logs it and tries
    the next. Rejected transports are closed. Raises `TransportMismatch` if none is left, or the `BadLayout` of the only
    one.
    """
    refused: list[str] = []
    last: BadLayout | None = None
    for name, transfer in _shared(client, wanted, options, where, refused):
        try:
            register(name, transfer)
        except (DeviceError, BadLayout, TransportMismatch) as error:
            transfer.close()
            if wanted != AUTO:
                raise
            log.warning("transport %s cannot be used for this engine's memory and is left out: %s", name, error)
            refused.append(_reason(name, error))
            last = error if isinstance(error, BadLayout) else None
        except BaseException:
            transfer.close()
            raise
        else:
            return
    if last is not None and len(refused) == 1:
        raise last
    raise TransportMismatch("no transport works on both sides", where=where, available="; ".join(refused))


def _shared(
    client: KVClient, wanted: str, options: Mapping[str, object], where: str, refused: list[str]
) -> Iterator[tuple[str, TransferContext]]:
    """Yield the transports one by one on demand; `refused` collects why others are left out."""
    offered = client.hello.transports
    for name in offered if wanted == AUTO else (wanted,):
        if name not in offered:
            refused.append(f"{name}: the server has {', '.join(offered)}")
            continue
        try:
            provider = client.plugins.resolve("transport", name, where=where)
        except PluginError as error:
            refused.append(_reason(name, error))
            continue
        if not isinstance(provider, AnyTransportProvider):
            refused.append(f"{name}: no transport here")
            continue
        chosen = client.plugins.options(provider, options, where=where)
        try:
            transfer = engine_half(provider, chosen, client)
        except DeviceError as error:
            refused.append(_reason(name, error))
            continue
        yield name, transfer


def _reason(name: str, error: KVFrameworkError) -> str:
    return f"{name}: {error.fact}" + (f" ({error.hint})" if error.hint else "")
