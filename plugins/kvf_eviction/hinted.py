"""The objects of which a request has said something: those that leave first, and those that are kept. Pure.

They are apart from a policy's own order, which has all others, so that without hints a policy works as if there were
none. A policy gives an object away with a mark of its own, and gets that back.

What is kept is a `SHARE` of a policy's objects at most, counted when a hint comes; a hint beyond that is none. It is
kept until its time, to `TICK_S`, which each hint sets anew, and an hour at most. Nothing is pinned: what is kept leaves
last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvframework.api.eviction import PackedKey, RequestFacts

SHARE = 0.25
LONGEST_S = 3600.0
TICK_S = 10.0
# Priorities are kept apart in so many steps.
STEPS = 4
# Objects whose time has passed that one call gives back.
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

    def may_keep(self, key: PackedKey, objects: int) -> bool:
        """Whether the key is kept, or there is room for one more, given the number of all objects of the policy."""
        return key in self.kept or len(self.kept) < SHARE * objects

    def add_kept(self, key: PackedKey, mark: int, facts: RequestFacts) -> None:
        """Add a key that is not here, until the time that the facts give."""
        end = int((facts.at + min(facts.keep_s, LONGEST_S)) // TICK_S) + 1
        step = min(max(facts.priority, 0), 99) * STEPS // 100
        level = self.kept[key] = (end, step)
        self._due_at = min(self._due_at, end * TICK_S) if self._levels else end * TICK_S
        self._levels.setdefault(level, OrderedDict())[key] = mark

    def due(self, at: float) -> list[tuple[PackedKey, int]]:
        """Remove keys whose time has passed, some of them; return them with their marks."""
        if not self._levels or at < self._due_at:
            return []
        due: list[tuple[PackedKey, int]] = []
        for level in sorted(self._levels):
            keys = self._levels[level]
            if level[0] * TICK_S > at:
                self._due_at = level[0] * TICK_S
                break
            while keys and len(due) < MOST_DUE:
                key, mark = keys.popitem(last=False)
                del self.kept[key]
                due.append((key, mark))
            if keys:
                break
            del self._levels[level]
        return due

    def last(self) -> Iterator[PackedKey]:
        """Yield what is kept: the lowest priority first, and of those what ends first."""
        for level in sorted(self._levels, key=lambda level: level[::-1]):
            yield from self._levels[level]
