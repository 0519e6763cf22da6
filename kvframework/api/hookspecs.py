"""The hook specifications. Hooks run once, at startup; their descriptors make the plain objects of the hot path.

Every hook takes no argument, is collect-all and returns a list of provider descriptors. A plugin is a module (or
object) with hook implementations, named by entry points of the group `kvframework.v1`: one entry point per provider,
called `<kind>.<name>`, for example in a plugin's pyproject.toml:

    [project.entry-points."kvframework.v1"]
    "tier.mystore" = "kvf_mystore"

Two distributions that offer one name are an error that names both. A process imports a plugin's module only if its
configuration or command names one of the plugins.

docs/plugins has a page for each kind, with an example; `kvframework new KIND NAME` writes a package of one.
"""

from __future__ import annotations

import pluggy

from kvframework.api.codec import CodecProvider
from kvframework.api.eviction import EvictionProvider
from kvframework.api.hasher import HasherProvider
from kvframework.api.layout import LayoutProvider
from kvframework.api.listener import ListenerProvider
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import PROJECT
from kvframework.api.requests import RequestsProvider
from kvframework.api.tier import TierProvider
from kvframework.api.transport import TransportProvider

_hookspec = pluggy.HookspecMarker(PROJECT)


@_hookspec
def kvf_transports() -> list[TransportProvider]:  # type: ignore[type-arg,empty-body]
    """Transports: how bytes move between engine memory and the server. An accelerator's returns a
    `kvf_devices.DeviceTransportProvider`, of the distribution kvframework-devices."""


@_hookspec
def kvf_layouts() -> list[LayoutProvider]:  # type: ignore[type-arg,empty-body]
    """Layouts: how an engine's tensors hold KV, and what one stored object looks like."""


@_hookspec
def kvf_memories() -> list[MemoryProvider]:  # type: ignore[type-arg,empty-body]
    """The memory of L1: the shared arena in which all objects lie."""


@_hookspec
def kvf_tiers() -> list[TierProvider]:  # type: ignore[type-arg,empty-body]
    """Tiers: L2 stores, which keep values for longer than the memory of one node."""


@_hookspec
def kvf_eviction_policies() -> list[EvictionProvider]:  # type: ignore[type-arg,empty-body]
    """Eviction policies: which object leaves L1 first."""


@_hookspec
def kvf_key_hashers() -> list[HasherProvider]:  # type: ignore[type-arg,empty-body]
    """Key hashers: from token ids to chained chunk digests."""


@_hookspec
def kvf_codecs() -> list[CodecProvider]:  # type: ignore[type-arg,empty-body]
    """Codecs: how an object's bytes are packed on their way to an L2 tier."""


@_hookspec
def kvf_request_handlers() -> list[RequestsProvider]:  # type: ignore[type-arg,empty-body]
    """Requests of a plugin's own, in its own namespace of names."""


@_hookspec
def kvf_listeners() -> list[ListenerProvider]:  # type: ignore[type-arg,empty-body]
    """Listeners: what a server's requests did, read off the serving thread."""
