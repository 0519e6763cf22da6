"""Conformance kits for plugins, and faults to test them with. Importing this imports neither pytest nor hypothesis."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvframework.testing.codec import CodecConformance
    from kvframework.testing.eviction import EvictionConformance
    from kvframework.testing.faults import FaultProxy, FaultyTier
    from kvframework.testing.hasher import HasherConformance
    from kvframework.testing.layout import LayoutConformance
    from kvframework.testing.memory import MemoryConformance
    from kvframework.testing.tier import TierConformance
    from kvframework.testing.transport import TransportConformance

__all__ = [
    "CodecConformance",
    "EvictionConformance",
    "FaultProxy",
    "FaultyTier",
    "HasherConformance",
    "LayoutConformance",
    "MemoryConformance",
    "TierConformance",
    "TransportConformance",
]

_HOMES = {
    "CodecConformance": "codec",
    "EvictionConformance": "eviction",
    "FaultProxy": "faults",
    "FaultyTier": "faults",
    "HasherConformance": "hasher",
    "LayoutConformance": "layout",
    "MemoryConformance": "memory",
    "TierConformance": "tier",
    "TransportConformance": "transport",
}

if "pytest" in sys.modules:
    # Without this, a failing assertion of the kit would not show its values.
    _KITS = sorted({*_HOMES.values(), "kit", "making", "together"} - {"faults"})
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{kit}" for kit in _KITS))


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name] != "faults":
        import_module(f"{__name__}.needs_pytest")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
