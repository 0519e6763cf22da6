"""The table of plugin kinds: the hook of each kind, and the descriptors that the hook may return."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvframework.api.codec import CodecProvider
from kvframework.api.driver import DeviceTransportProvider
from kvframework.api.eviction import EvictionProvider
from kvframework.api.hasher import HasherProvider
from kvframework.api.layout import LayoutProvider
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import Provider
from kvframework.api.requests import RequestsProvider
from kvframework.api.tier import TierProvider
from kvframework.api.transport import TransportProvider


class Kind(NamedTuple):
    """One kind of plugin."""

    hook: str
    providers: tuple[type[Provider[Any]], ...]


KINDS: dict[str, Kind] = {
    "transport": Kind("kvf_transports", (TransportProvider, DeviceTransportProvider)),
    "layout": Kind("kvf_layouts", (LayoutProvider,)),
    "memory": Kind("kvf_memories", (MemoryProvider,)),
    "tier": Kind("kvf_tiers", (TierProvider,)),
    "eviction": Kind("kvf_eviction_policies", (EvictionProvider,)),
    "hasher": Kind("kvf_key_hashers", (HasherProvider,)),
    "codec": Kind("kvf_codecs", (CodecProvider,)),
    "requests": Kind("kvf_request_handlers", (RequestsProvider,)),
}
