"""The kinds of plugins, and the plugins of installed distributions, from their metadata alone. Imports no plugin."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

from kvframework.api.codec import CodecProvider
from kvframework.api.eviction import EvictionProvider
from kvframework.api.hasher import HasherProvider
from kvframework.api.layout import LayoutProvider
from kvframework.api.listener import ListenerProvider
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import API_VERSION, ENTRY_POINT_GROUP, Provider
from kvframework.api.requests import RequestsProvider
from kvframework.api.tier import TierProvider
from kvframework.api.transport import TransportProvider


class Kind(NamedTuple):
    """`table` is where the TOML names plugins of the kind."""

    hook: str
    provider: type[Provider[Any]]
    table: str


KINDS: dict[str, Kind] = {
    "transport": Kind("kvf_transports", TransportProvider, "[[transport]]"),
    "layout": Kind("kvf_layouts", LayoutProvider, "[[layout]]"),
    "memory": Kind("kvf_memories", MemoryProvider, "[l1]"),
    "tier": Kind("kvf_tiers", TierProvider, "[[l2]]"),
    "eviction": Kind("kvf_eviction_policies", EvictionProvider, "[l1.eviction]"),
    "hasher": Kind("kvf_key_hashers", HasherProvider, "[hasher]"),
    "codec": Kind("kvf_codecs", CodecProvider, "codec of [[l2]]"),
    "requests": Kind("kvf_request_handlers", RequestsProvider, "[[requests]]"),
    "listener": Kind("kvf_listeners", ListenerProvider, "[[listener]]"),
}

# Plugins of this project that are separate distributions, by their entry points.
FIRST_PARTY = {
    "codec.aead": "kvframework-crypto",
    "listener.control": "kvframework-control",
    "listener.events": "kvframework-events",
    "listener.usage": "kvframework-quota",
    "requests.blend": "kvframework-blend",
    "tier.filesystem": "kvframework-filesystem",
    "tier.mooncake": "kvframework-mooncake",
    "tier.peers": "kvframework-peers",
    "tier.redis": "kvframework-redis",
    "tier.s3": "kvframework-s3",
    "transport.cuda_ipc": "kvframework-cuda",
}
_GROUP = re.compile(re.escape(ENTRY_POINT_GROUP.rpartition(".v")[0]) + r"\.v(\d+)")


@dataclass(frozen=True)
class EntryPointInfo:
    """One offer of one provider, by one distribution. `value` names a module or an object in one. An entry point is
    called `<kind>.<name>`; one without a dot has the kind "". `api_major` comes from the group."""

    kind: str
    name: str
    distribution: str
    version: str
    value: str
    api_major: int = API_VERSION[0]

    @property
    def title(self) -> str:
        return f"{self.kind}.{self.name}" if self.kind else self.name

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version}".strip()

    def __str__(self) -> str:
        return f"{self.title} ({self.value}) of {self.origin}"


def discover() -> list[EntryPointInfo]:
    """All offers on `sys.path`, of other API majors too, by kind, name and distribution. Blocking: reads metadata."""
    installed = metadata.entry_points()
    offers = {
        _info(entry_point, int(match[1]))
        for group in installed.groups
        if (match := _GROUP.fullmatch(group))
        for entry_point in installed.select(group=group)
    }
    return sorted(offers, key=lambda offer: (offer.kind, offer.name, offer.distribution, offer.value))


def _info(entry_point: metadata.EntryPoint, api_major: int) -> EntryPointInfo:
    kind, dot, name = entry_point.name.partition(".")
    if not dot:
        kind, name = "", entry_point.name
    distribution = entry_point.dist
    origin = (distribution.name, distribution.version) if distribution else ("unknown", "")
    return EntryPointInfo(kind, name, *origin, entry_point.value, api_major)
