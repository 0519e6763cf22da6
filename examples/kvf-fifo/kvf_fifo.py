"""Owns the eviction policy `fifo`: what came first goes first, however often it is used. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvframework.api import EvictionPolicy, EvictionProvider, NoOptions, PackedKey, hookimpl


class Fifo(EvictionPolicy):
    """See the module."""

    name = "fifo"

    def __init__(self) -> None:
        self._keys: dict[PackedKey, None] = {}

    def on_insert(self, key: PackedKey, nbytes: int) -> None:
        self._keys[key] = None

    def on_access(self, key: PackedKey) -> None:
        """Use changes nothing."""

    def on_remove(self, key: PackedKey) -> None:
        del self._keys[key]

    def victims(self) -> Iterator[PackedKey]:
        return iter(self._keys)


@hookimpl
def kvf_eviction_policies() -> list[EvictionProvider[NoOptions]]:
    return [EvictionProvider(name="fifo", summary="first in, first out", create=lambda _options: Fifo())]
