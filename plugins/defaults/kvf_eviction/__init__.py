"""Eviction policies of the framework itself: the order in which objects leave L1."""

from __future__ import annotations

from kvf_eviction.lru import Lru
from kvf_eviction.two_queues import TwoQueues
from kvframework.api.eviction import EvictionProvider, hookimpl
from kvframework.api.plugin import NoOptions

__all__ = ["Lru", "TwoQueues", "kvf_eviction_policies"]


@hookimpl
def kvf_eviction_policies() -> list[EvictionProvider[NoOptions]]:
    return [
        EvictionProvider(name="lru", summary="evicts the least recently used object first", create=lambda _: Lru()),
        EvictionProvider(
            name="two_queues",
            summary="separates objects used once from objects used again, and learns which to keep",
            create=lambda _: TwoQueues(),
        ),
    ]
