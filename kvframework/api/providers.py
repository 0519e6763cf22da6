"""Owns the provider descriptors: what a hook returns. Made at startup; what `create` makes is called on hot paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from kvframework.api.codec import Codec
from kvframework.api.driver import Arena, CopierDriver, DeviceOptions, EngineDriver
from kvframework.api.eviction import EvictionPolicy
from kvframework.api.findings import Finding
from kvframework.api.hasher import KeyHasher
from kvframework.api.layout import Layout
from kvframework.api.requests import CacheServices, Handler
from kvframework.api.server_transport import ServerTransport
from kvframework.api.tier import L1Memory, Tier
from kvframework.api.transport import EngineLink, TransferContext
from kvframework.api.types import NoOptions, Options
from kvframework.errors import PluginBroken

O = TypeVar("O", bound=Options)  # noqa: E741
D = TypeVar("D", bound=DeviceOptions)

API_VERSION = (1, 0)
# Loads, or batches of the write-back, that call one tier at once.
MAX_TIER_CALLS = 64


def always_available() -> str | None:
    """The default probe: nothing stands in the way."""
    return None


@dataclass(frozen=True)
class TierContext:
    """What a tier may know when it is created, and what is diagnosed: its place in the TOML, for error texts."""

    where: str


# (options, TierContext, deadline) -> Sequence[Finding]: what `kvframework doctor` tells of a plugin's store or device.
Diagnose = Callable[[O, TierContext, float], Sequence[Finding]]


@dataclass(frozen=True, kw_only=True)
class Provider(Generic[O]):
    """What every descriptor holds.

    `name` is the part of the entry point after the kind. `options` validates the plugin's TOML table. `requires_api` is
    the lowest API version "major.minor" that the plugin needs. `probe` says why the plugin cannot run here (with the
    command that installs what is missing), or None; it must be quick and without side effects.
    """

    kind: ClassVar[str]

    name: str
    summary: str
    options: type[O] = NoOptions  # type: ignore[assignment]
    requires_api: str = "1.0"
    capabilities: frozenset[str] = frozenset()
    probe: Callable[[], str | None] = always_available


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


@dataclass(frozen=True, kw_only=True)
class LayoutProvider(Provider[O]):
    """`create` makes the layout: in engines with the engine's options, in servers with those of the TOML."""

    kind = "layout"
    create: Callable[[O], Layout]


@dataclass(frozen=True, kw_only=True)
class L1Provider(Provider[O]):
    """A tier for `[l1]`: provides the arena's memory. `diagnose` as for `TierProvider`."""

    kind = "tier"
    create: Callable[[O, TierContext], L1Memory]
    diagnose: Diagnose[O] | None = None


@dataclass(frozen=True, kw_only=True)
class TierProvider(Provider[O]):
    """A tier for `[[l2]]`. Capabilities: "shared" (between nodes), "ttl", "capacity", "scan".

    `loads` and `writes` are how many loads and how many batches of the write-back call the tier at once, unless its
    `[[l2]]` table says another number: 1 for a store that takes one call after the other anyway. Whatever they are, a
    tier is called from several threads at once.

    `diagnose` is a function (options, TierContext, deadline) -> Sequence[Finding] and says what `kvframework doctor`
    should tell of the store: is it reachable, large enough, set up as a cache? It runs in a process of its own, may
    block until `deadline` on `time.monotonic()`, and changes nothing: a server may be using the store. What is wrong is
    a finding or a `KVFrameworkError`.
    """

    kind = "tier"
    create: Callable[[O, TierContext], Tier]
    diagnose: Diagnose[O] | None = None
    loads: int = 2
    writes: int = 1

    def __post_init__(self) -> None:
        for name, value in (("loads", self.loads), ("writes", self.writes)):
            if not 1 <= value <= MAX_TIER_CALLS:
                raise PluginBroken(
                    f"{name} is {value}", where=f"tier.{self.name}", available=f"1 to {MAX_TIER_CALLS} calls at once"
                )


@dataclass(frozen=True, kw_only=True)
class EvictionProvider(Provider[O]):
    """`create` makes the policy of one server's L1."""

    kind = "eviction"
    create: Callable[[O], EvictionPolicy]


@dataclass(frozen=True, kw_only=True)
class HasherProvider(Provider[O]):
    """`create` makes a hasher: the server one, and every client one by the name that the server tells it."""

    kind = "hasher"
    create: Callable[[O], KeyHasher]


@dataclass(frozen=True, kw_only=True)
class CodecProvider(Provider[O]):
    """`create` makes the codec that all tiers of one server share."""

    kind = "codec"
    create: Callable[[O], Codec]


@dataclass(frozen=True, kw_only=True)
class RequestsProvider(Provider[O]):
    """Requests of a plugin's own; their names start with `name` and a dot."""

    kind = "requests"
    create: Callable[[O, CacheServices], Sequence[Handler]]  # type: ignore[type-arg]
