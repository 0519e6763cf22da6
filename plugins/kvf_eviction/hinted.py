"""The objects of which a request has said something: those that leave first, and those that are kept. Pure.

They are apart from a policy's own order, which has all others, so that without hints a policy works as if there were
none. A policy gives an object away with a mark of its own, and gets that back.

What is kept is a `SHARE` at most of the objects that the policy had when it was last asked for victims, since L1 is
full then; a hint beyond that is none. It is kept until its time, to `TICK_S`, which each hint sets again, an hour at
most. Nothing is pinned: what is kept leaves last.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvframework.api.eviction import PackedKey, RequestFacts

SHARE = 0.25
LONGEST_S = 3600.0
TICK_S = 10.0
# Priorities are kept apart in so many steps.
STEPS = 4
# Objects that one call gives back.
MOST_DUE = 512

# When it ends, in ticks, and the step of its priority.
_Level = tuple[int, int]


class Hinted:
    """See the module. Every call is O(1) for each key; there are at most `STEPS` levels for each tick of an hour."""

    def __init__(self) -> None:
        # What leaves first, by the time of the hint, and its mark.
        self.done: OrderedDict[PackedKey, int] = OrderedDict()
        self.kept: dict[PackedKey, _Level] = {}
        self._levels: dict[_Level, OrderedDict[PackedKey, int]] = {}
        # No level ends before this time.
        self._due_at = 0.0
        # The number that may be kept.
        self._most = math.inf

    def __len__(self) -> int:
        return len(self.done) + len(self.kept)

    def has_any(self, keys: Iterable[PackedKey]) -> bool:
        """Whether one of `keys` is here."""
        done, kept = self.done, self.kept
        return bool(done or kept) and not (done.keys().isdisjoint(keys) and kept.keys().isdisjoint(keys))

    def take(self, key: PackedKey) -> int | None:
        """Remove a key; return its mark, None if it is not here."""
        mark = self.done.pop(key, None)
        if mark is None and (level := self.kept.pop(key, None)) is not None:
            at = self._levels[level]
            mark = at.pop(key)
            if not at:
                del self._levels[level]
        return mark

    def add_done(self, key: PackedKey, mark: int) -> None:
        """Add a key that is not here: it leaves after those that were added before."""
        self.done[key] = mark

    def full_at(self, objects: int) -> None:
        """Note that L1 is full, with so many objects of the policy, these included."""
        self._most = SHARE * objects

    def may_keep(self, key: PackedKey) -> bool:
        """Whether the key is kept, or there is room for one more."""
        return key in self.kept or len(self.kept) < self._most

    def add_kept(self, key: PackedKey, mark: int, facts: RequestFacts) -> None:
        """Add a key that is not here, until the time that the facts give."""
        end = int((facts.at + min(facts.keep_s, LONGEST_S)) // TICK_S) + 1
        step = min(max(facts.priority, 0), 99) * STEPS // 100
        level = self.kept[key] = (end, step)
        self._due_at = min(self._due_at, end * TICK_S) if self._levels else end * TICK_S
        self._levels.setdefault(level, OrderedDict())[key] = mark

    def due(self, at: float) -> list[tuple[PackedKey, int]]:
        """Remove keys whose time has passed, or that are too many, some of them; return them with their marks."""
        if not self._levels or (at < self._due_at and len(self.kept) <= self._most):
            return []
        due: list[tuple[PackedKey, int]] = []
        for level in sorted(self._levels):
            if level[0] * TICK_S > at:
                self._due_at = level[0] * TICK_S
                break
            self._give_back(level, MOST_DUE, due)
        for level in self._by_priority():
            excess = len(self.kept) - self._most
            if excess <= 0:
                break
            self._give_back(level, min(MOST_DUE, math.ceil(excess) + len(due)), due)
        return due

    def last(self) -> Iterator[PackedKey]:
        """Yield what is kept: the lowest priority first, and of those what ends first."""
        for level in self._by_priority():
            yield from self._levels[level]

    def _by_priority(self) -> list[_Level]:
        return sorted(self._levels, key=lambda level: level[::-1])

    def _give_back(self, level: _Level, most: int, into: list[tuple[PackedKey, int]]) -> None:
        """Remove keys of a level until there are `most` in the list."""
        keys = self._levels[level]
        while keys and len(into) < most:
            key, mark = keys.popitem(last=False)
            del self.kept[key]
            into.append((key, mark))
        if not keys:
            del self._levels[level]
