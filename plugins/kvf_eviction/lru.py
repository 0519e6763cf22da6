"""The least-recently-used policy. Called in the server, under the storage lock; pure, every call is O(1)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from kvframework.api.eviction import EvictionPolicy, PackedKey, RequestFacts, Why


class Lru(EvictionPolicy):
    """Evicts the objects that were inserted or accessed longest ago first."""

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[PackedKey, None] = OrderedDict()

    def on_insert(self, key: PackedKey, nbytes: int) -> None:
        self._order[key] = None

    def on_access(self, key: PackedKey) -> None:
        self._order.move_to_end(key)

    def on_access_many(self, keys: Sequence[PackedKey]) -> None:
        # One call into C for all keys, without a step of the interpreter.
        deque(map(self._order.move_to_end, keys), maxlen=0)

    def on_remove(self, key: PackedKey) -> None:
        del self._order[key]

    def on_inserts(
        self, keys: Sequence[PackedKey], sizes: Sequence[int], chunks: Sequence[int], facts: RequestFacts
    ) -> None:
        self._order.update(dict.fromkeys(keys))

    def on_removes(self, keys: Sequence[PackedKey], why: Why) -> None:
        deque(map(self._order.pop, keys), maxlen=0)

    def victims(self) -> Iterator[PackedKey]:
        return iter(self._order)
