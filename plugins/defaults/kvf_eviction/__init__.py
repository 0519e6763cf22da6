"""Eviction policies of the framework itself: the order in which objects leave L1."""

from __future__ import annotations

from kvf_eviction.lru import Lru
from kvf_eviction.two_queues import TwoQueues
from kvframework.api.eviction import EvictionProvider, hookimpl
from kvframework.api.plugin import NoOptions

__all__ = ["Lru", "TwoQueues", "kvf_eviction_policies"]


def _create_lru(_: NoOptions) -> Lru:
    return Lru()


def _create_two_queues(_: NoOptions) -> TwoQueues:
    return TwoQueues()


@hookimpl
def kvf_eviction_policies() -> list[EvictionProvider[NoOptions]]:
    return [
        EvictionProvider(name="lru", summary="the least recently used object leaves first", create=_create_lru),
        EvictionProvider(
            name="two_queues",
            summary="what was used again apart from what was not; learns which of the two to keep",
            create=_create_two_queues,
        ),
    ]
