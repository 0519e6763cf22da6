"""The `EvictionPolicy` contract: the order in which objects leave L1. Called under the storage lock, never blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvframework.api.keys import PackedKey
from kvframework.api.plugin import O, Provider, hookimpl

__all__ = ["EvictionPolicy", "EvictionProvider", "PackedKey", "hookimpl"]


class EvictionPolicy(ABC):
    """An order of the objects in L1. The core decides when to evict, and skips pinned and unfinished objects.

    The order is a preference: where the best victim alone does not free the contiguous bytes that an object needs, the
    core empties the window of the arena that holds most of the next victims, and with it evicts others that lie
    between them: less than twice the needed bytes, or a single larger object.

    Called from several threads, one at a time. The time of a call must not grow with the number of objects.
    """

    name: str

    @abstractmethod
    def on_insert(self, key: PackedKey, nbytes: int) -> None:
        """`key` was committed and is now readable. Never called twice for a key without `on_remove` between."""

    @abstractmethod
    def on_access(self, key: PackedKey) -> None:
        """`key` was looked up or retrieved. Only for keys in L1."""

    def on_access_many(self, keys: Sequence[PackedKey]) -> None:
        """`on_access` for each of `keys`, in this order: the objects of one request, 8,192 at most. A key may occur
        twice."""
        for key in keys:
            self.on_access(key)

    @abstractmethod
    def on_remove(self, key: PackedKey) -> None:
        """`key` left L1, by eviction or otherwise. Only for keys in L1."""

    @abstractmethod
    def victims(self) -> Iterator[PackedKey]:
        """Returns all keys in L1, best victim first, lazily.

        The core may stop iterating at any point. It calls no other method while it iterates.
        """


@dataclass(frozen=True, kw_only=True)
class EvictionProvider(Provider[O]):
    """An eviction policy. `create` makes the policy of one server's L1."""

    kind = "eviction"
    create: Callable[[O], EvictionPolicy]
