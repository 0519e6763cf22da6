"""Owns how an instance registers: from the engine's tensors to a layout, a namespace, a transport and the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvframework.api import (
    KVLayout,
    Layout,
    LayoutProvider,
    TransferContext,
    TransportProvider,
    compute_namespace,
)
from kvframework.client.connection import KVClient
from kvframework.errors import PluginError, PluginWrongKind, TransportMismatch


@dataclass(frozen=True)
class InstanceIdentity:
    """What names an instance and its KV. `revision`, `quantization` and `packing` go into the namespace: whatever
    may make the KV of two engines differ must differ here."""

    instance_id: int
    model_name: str
    world_size: int = 1
    rank: int = 0
    revision: str = ""
    quantization: str = ""
    packing: str = ""
    layout: str = "paged"
    layout_options: Mapping[str, object] = field(default_factory=dict)
    transport: str = "auto"
    transport_options: Mapping[str, object] = field(default_factory=dict)


def create_layout(client: KVClient, identity: InstanceIdentity) -> Layout:
    """The engine half of the layout plugin. Raises `PluginError`, `ConfigFieldError`."""
    where = f"layout of instance {identity.instance_id}"
    provider = client.plugins.resolve("layout", identity.layout, where=where)
    if not isinstance(provider, LayoutProvider):
        raise PluginWrongKind(f"{identity.layout!r} is no layout", where=where)
    layout: Layout = provider.create(client.plugins.options(provider, identity.layout_options, where=where))
    return layout


def create_transport(client: KVClient, identity: InstanceIdentity) -> tuple[str, TransferContext]:
    """The first transport that both sides have, in the server's order, or the one named. Raises `TransportMismatch`."""
    where = f"transport of instance {identity.instance_id}"
    offered = client.hello.transports
    wanted = offered if identity.transport == "auto" else (identity.transport,)
    reasons = []
    for name in wanted:
        if name not in offered:
            reasons.append(f"{name}: the server has {', '.join(offered)}")
            continue
        try:
            provider = client.plugins.resolve("transport", name, where=where)
        except PluginError as error:
            reasons.append(f"{name}: {error.fact}")
            continue
        if not isinstance(provider, TransportProvider):
            reasons.append(f"{name}: no transport here")
            continue
        options = client.plugins.options(provider, identity.transport_options, where=where)
        context: TransferContext = provider.create(options, client)
        return name, context
    raise TransportMismatch("no transport works on both sides", where=where, available="; ".join(reasons))


def namespace_of(client: KVClient, identity: InstanceIdentity, layout: Layout, declared: KVLayout) -> bytes:
    """The 16 bytes that scheduler and workers of one deployment share."""
    return compute_namespace(
        model=identity.model_name,
        desc=layout.object_desc(declared, client.chunk_size),
        hasher_fingerprint=client.hello.hasher_fingerprint,
        world_size=identity.world_size,
        revision=identity.revision,
        quantization=identity.quantization,
        packing=identity.packing,
    )
