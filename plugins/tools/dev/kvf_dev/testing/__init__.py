"""Conformance kits for plugins, and faults to test them with. Importing this imports neither pytest nor hypothesis."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvf_dev.testing.codec import CodecConformance
    from kvf_dev.testing.eviction import EvictionConformance
    from kvf_dev.testing.faults import FaultProxy, FaultyTier
    from kvf_dev.testing.hasher import HasherConformance
    from kvf_dev.testing.layout import LayoutConformance
    from kvf_dev.testing.listener import ListenerConformance
    from kvf_dev.testing.memory import MemoryConformance
    from kvf_dev.testing.tier import TierConformance
    from kvf_dev.testing.transport import TransportConformance

__all__ = [
    "CodecConformance",
    "EvictionConformance",
    "FaultProxy",
    "FaultyTier",
    "HasherConformance",
    "LayoutConformance",
    "ListenerConformance",
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
    "ListenerConformance": "listener",
    "MemoryConformance": "memory",
    "TierConformance": "tier",
    "TransportConformance": "transport",
}

if "pytest" in sys.modules:
    # Without this, a failing assertion of the kit would not show its values.
    _KITS = sorted({*_HOMES.values(), "kit", "making"} - {"faults"})
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{kit}" for kit in _KITS))


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name] != "faults":
        import_module(f"{__name__}.needs_pytest")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
