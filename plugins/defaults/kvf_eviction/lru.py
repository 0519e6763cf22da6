"""The least-recently-used policy. Called in the server, under the storage lock; pure, every call is O(1)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import chain

from kvf_eviction.hinted import Hinted, sized
from kvframework.api.eviction import EvictionPolicy, PackedKey, RequestFacts, Why


class Lru(EvictionPolicy):
    """Evicts the objects that were inserted or accessed longest ago first; before them those that no one asks for
    again, and after them those to keep, as requests have said (`kvf_eviction.hinted`)."""

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[PackedKey, None] = OrderedDict()
        self._hinted = Hinted()

    def __len__(self) -> int:
        return len(self._order) + len(self._hinted)

    def on_insert(self, key: PackedKey, nbytes: int) -> None:
        self._order[key] = None

    def on_access(self, key: PackedKey) -> None:
        self.on_access_many((key,))

    def on_access_many(self, keys: Sequence[PackedKey]) -> None:
        if self._hinted.has_any(keys):
            self._used_hinted(keys)
            return
        # One call into C for all keys, without a step of the interpreter.
        deque(map(self._order.move_to_end, keys), maxlen=0)

    def on_remove(self, key: PackedKey) -> None:
        self.on_removes((key,), "removed")

    def on_inserts(
        self, keys: Sequence[PackedKey], sizes: Sequence[int], chunks: Sequence[int], facts: RequestFacts
    ) -> None:
        self._order.update(dict.fromkeys(keys))
        self._heed(keys, facts)

    def on_uses(self, keys: Sequence[PackedKey], facts: RequestFacts) -> None:
        self.on_access_many(keys)
        self._heed(keys, facts)

    def on_removes(self, keys: Sequence[PackedKey], why: Why) -> None:
        if self._hinted.has_any(keys):
            keys = [key for key in keys if self._hinted.take(key) is None]
        deque(map(self._order.pop, keys), maxlen=0)

    def victims(self) -> Iterator[PackedKey]:
        self._hinted.full()
        if not self._hinted:
            return iter(self._order)
        return chain(self._hinted.done, self._order, self._hinted.last())

    def _used_hinted(self, keys: Sequence[PackedKey]) -> None:
        hinted, order = self._hinted, self._order
        for key in keys:
            if key in hinted.kept:
                continue
            hinted.take(key)
            order[key] = None
            order.move_to_end(key)

    def _heed(self, keys: Sequence[PackedKey], facts: RequestFacts) -> None:
        hinted, order = self._hinted, self._order
        for key, _ in hinted.due(facts):
            order[key] = None
        if not facts.hint:
            return
        is_done = facts.hint == "done"
        for key, nbytes in sized(keys, facts):
            if is_done or hinted.may_keep(key, nbytes):
                hinted.take(key)
                order.pop(key, None)
                if is_done:
                    hinted.add_done(key, 0)
                else:
                    hinted.add_kept(key, nbytes, 0, facts)
