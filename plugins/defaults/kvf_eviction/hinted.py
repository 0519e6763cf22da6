"""The objects of which a request has said something: those that leave first, and those that are kept. Pure.

They are apart from a policy's own order, which has all others, so that without hints a policy works as if there were
none. A policy gives an object away with a mark of its own, and gets that back.

What is kept is a `SHARE` at most of the bytes that the policy's objects had when it was last asked for victims, since
L1 is full then; a hint beyond that is none. It is kept until its time, to `TICK_S`, which each hint sets again, an hour
at most. Nothing is pinned: what is kept leaves last.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

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


class _Kept(NamedTuple):
    level: _Level
    nbytes: int


def sized(keys: Sequence[PackedKey], facts: RequestFacts) -> Iterable[tuple[PackedKey, int]]:
    """Return each key once, in its order, with its bytes; 0 where the facts do not say them."""
    return dict(zip(keys, facts.sizes or repeat(0), strict=False)).items()


class Hinted:
    """See the module. Every call is O(1) for each key; there are at most `STEPS` levels for each tick of an hour."""

    def __init__(self) -> None:
        # What leaves first, by the time of the hint, and its mark.
        self.done: OrderedDict[PackedKey, int] = OrderedDict()
        self.kept: dict[PackedKey, _Kept] = {}
        self.kept_bytes = 0
        self._levels: dict[_Level, OrderedDict[PackedKey, int]] = {}
        # No level ends before this time.
        self._due_at = 0.0
        # The bytes of the policy's objects, as last heard, and those that may be kept.
        self._held = 0
        self._most = math.inf

    def __len__(self) -> int:
        return len(self.done) + len(self.kept)

    def has_any(self, keys: Iterable[PackedKey]) -> bool:
        done, kept = self.done, self.kept
        return bool(done or kept) and not (done.keys().isdisjoint(keys) and kept.keys().isdisjoint(keys))

    def take(self, key: PackedKey) -> int | None:
        """Remove a key; return its mark, None if it is not here."""
        mark = self.done.pop(key, None)
        if mark is None and (kept := self.kept.pop(key, None)) is not None:
            self.kept_bytes -= kept.nbytes
            at = self._levels[kept.level]
            mark = at.pop(key)
            if not at:
                del self._levels[kept.level]
        return mark

    def add_done(self, key: PackedKey, mark: int) -> None:
        """Add a key that is not here: it leaves after those that were added before."""
        self.done[key] = mark

    def full(self) -> None:
        """Note that L1 is full: what is held now bounds what may be kept."""
        if self._held:
            self._most = SHARE * self._held

    def may_keep(self, key: PackedKey, nbytes: int) -> bool:
        """Whether the key is kept, or there is room for so many bytes."""
        return key in self.kept or self.kept_bytes + nbytes <= self._most

    def add_kept(self, key: PackedKey, nbytes: int, mark: int, facts: RequestFacts) -> None:
        """Add a key that is not here, until the time that the facts give."""
        end = int((facts.at + min(facts.keep_s, LONGEST_S)) // TICK_S) + 1
        step = min(max(facts.priority, 0), 99) * STEPS // 100
        level = (end, step)
        self.kept[key] = _Kept(level, nbytes)
        self.kept_bytes += nbytes
        self._due_at = min(self._due_at, end * TICK_S) if self._levels else end * TICK_S
        self._levels.setdefault(level, OrderedDict())[key] = mark

    def due(self, facts: RequestFacts) -> list[tuple[PackedKey, int]]:
        """Remove keys whose time has passed, or that are too much, some of them; return them with their marks."""
        at = facts.at
        self._held = facts.held or self._held
        if not self._levels or (at < self._due_at and self.kept_bytes <= self._most):
            return []
        due: list[tuple[PackedKey, int]] = []
        for level in sorted(self._levels):
            if level[0] * TICK_S > at:
                self._due_at = level[0] * TICK_S
                break
            self._give_back(level, -1, due)
        for level in self._by_priority():
            self._give_back(level, self._most, due)
        return due

    def last(self) -> Iterator[PackedKey]:
        """Yield what is kept: the lowest priority first, and of those what ends first."""
        for level in self._by_priority():
            yield from self._levels[level]

    def _by_priority(self) -> list[_Level]:
        return sorted(self._levels, key=lambda level: level[::-1])

    def _give_back(self, level: _Level, most: float, into: list[tuple[PackedKey, int]]) -> None:
        """Remove keys of a level until no more than `most` bytes are kept, or `MOST_DUE` keys are in the list."""
        keys = self._levels[level]
        while keys and self.kept_bytes > most and len(into) < MOST_DUE:
            key, mark = keys.popitem(last=False)
            self.kept_bytes -= self.kept.pop(key).nbytes
            into.append((key, mark))
        if not keys:
            del self._levels[level]
