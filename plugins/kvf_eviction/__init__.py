"""Eviction policies of the framework itself: the order in which objects leave L1."""

from __future__ import annotations

from kvf_eviction.lru import Lru
from kvframework.api.eviction import EvictionProvider, hookimpl
from kvframework.api.options import NoOptions

__all__ = ["Lru", "kvf_eviction_policies"]


def _create(_: NoOptions) -> Lru:
    return Lru()


@hookimpl
def kvf_eviction_policies() -> list[EvictionProvider[NoOptions]]:
    return [EvictionProvider(name="lru", summary="the least recently used object leaves first", create=_create)]
