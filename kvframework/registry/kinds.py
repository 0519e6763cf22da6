"""Owns the table of plugin kinds: which hook offers a kind, and which descriptors that hook may return."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvframework.api import (
    AnyTransportProvider,
    CodecProvider,
    EvictionProvider,
    HasherProvider,
    L1Provider,
    LayoutProvider,
    Provider,
    RequestsProvider,
    TierProvider,
)


class Kind(NamedTuple):
    """One kind of plugin."""

    hook: str
    providers: tuple[type[Provider[Any]], ...]


KINDS: dict[str, Kind] = {
    "transport": Kind("kvf_transports", (AnyTransportProvider,)),
    "layout": Kind("kvf_layouts", (LayoutProvider,)),
    "tier": Kind("kvf_tiers", (TierProvider, L1Provider)),
    "eviction": Kind("kvf_eviction_policies", (EvictionProvider,)),
    "hasher": Kind("kvf_key_hashers", (HasherProvider,)),
    "codec": Kind("kvf_codecs", (CodecProvider,)),
    "requests": Kind("kvf_request_handlers", (RequestsProvider,)),
}
