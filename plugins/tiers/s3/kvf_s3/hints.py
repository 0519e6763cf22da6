"""Keys that this server has stored or found, for which a store need not be asked again for a while. Pure.

A hint may be stale: the value may have been deleted by others. Who follows it finds that out, and forgets it.
"""

from __future__ import annotations

from collections import OrderedDict

from kvframework.api.tier import PackedKey

# About 10 MB. Two keys of the same hash would make a stale hint, which is none the worse.
MANY = 100_000


class Hints:
    """Keys, the oldest first. For one thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: OrderedDict[int, float] = OrderedDict()

    def note(self, key: PackedKey, now: float) -> None:
        if self._seconds:
            self._until[hash(key)] = now + self._seconds
            self._until.move_to_end(hash(key))
            if len(self._until) > MANY:
                self._until.popitem(last=False)

    def forget(self, key: PackedKey) -> None:
        self._until.pop(hash(key), None)

    def has(self, key: PackedKey, now: float) -> bool:
        return self._until.get(hash(key), now) > now
