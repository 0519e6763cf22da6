"""Conformance kits for plugins, and faults to test them with. Importing this imports neither pytest nor hypothesis."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvf_dev.testing.codec import CodecConformance
    from kvf_dev.testing.eviction import EvictionConformance
    from kvf_dev.testing.faults import FaultProxy
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
    "HasherConformance",
    "LayoutConformance",
    "ListenerConformance",
    "MemoryConformance",
    "TierConformance",
    "TransportConformance",
]


def _home(name: str) -> str:
    """Return the module of a name: a kit's is called after the kind of plugin."""
    return "faults" if name.startswith("Fault") else name.removesuffix("Conformance").lower()


if "pytest" in sys.modules:
    # Without this, a failing assertion of the kit would not show its values.
    _KITS = sorted({*map(_home, __all__), "kit"} - {"faults"})
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{kit}" for kit in _KITS))


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_home(name)}"), name)
