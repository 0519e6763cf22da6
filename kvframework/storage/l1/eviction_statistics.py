"""What left L1: how many objects for which cause, how long unused, how soon wanted again, and which hits a larger L1
would give. Pure. An eviction costs 3 us, a lookup that hits 0.2 us, each evicted chunk that a lookup misses 0.5 us."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from kvframework.api.counter import Histogram
from kvframework.api.keys import NAMESPACE_BYTES, PackedKey
from kvframework.storage.l1.entries import ALIGNMENT, StoredObject


class Cause(IntEnum):
    """Why L1 lacks an object."""

    # Evicted: for the place of another object, to get below the watermark, by the share of its tenant, or for any of
    # these, as a request had said that nobody asks for it again.
    ROOM = 0
    WATERMARK = 1
    TENANT = 2
    HINTED = 3
    CLEARED = 4
    # Its value in a tier was damaged.
    DAMAGED = 5
    # Never stored: L1 had no room, the client had reserved its share, or the eviction policy did not want it.
    DROPPED_FULL = 6
    DROPPED_SHARE = 7
    REFUSED = 8


EVICTIONS = (Cause.ROOM, Cause.WATERMARK, Cause.TENANT, Cause.HINTED)
# A number, since a member of an enumeration is slow to find.
LAST_EVICTION = int(max(EVICTIONS))
CAUSES = tuple(cause.name.lower() for cause in Cause)

# Capacities of the curve: four steps for each doubling, up to eight times the present one.
_STEPS = 12
_STEPS_PER_DOUBLING = 4
_SEGMENTS_PER_CAPACITY = 16
_MOST_SEGMENTS = 512
# Places are computed again after this share of a capacity has been evicted or has come back.
_STALE = 64


class EvictedStack:
    """How many units of bytes have left L1 since an object left, without those that came back.

    Under a policy by recency, the objects of L1 and then those that left it, the last first, are the stack of a larger
    L1: an object would still be there if L1 were larger by the units that were evicted from it on and have not come
    back. A place is a number from 1, larger for what left later. The stack is right to a fraction of a `segment`, and
    forgets its oldest segments.
    """

    def __init__(self, segment: int) -> None:
        self._segment = max(segment, 1)
        # The units that were ever added, and removed again.
        self.pushed = self.taken = 0
        # The units of each segment, from the number `_first` on, that have not come back.
        self._live = deque([0])
        self._first = 0

    def push(self, units: int) -> int:
        """Add the units of an object that is evicted; return its place."""
        place = self.pushed + 1
        self.pushed += units
        self._live[-1] += units
        while self._first + len(self._live) <= (self.pushed + 1) // self._segment:
            self._live.append(0)
            if len(self._live) > _MOST_SEGMENTS:
                self._live.popleft()
                self._first += 1
        return place

    def take(self, place: int, units: int) -> None:
        """Remove the units of an object that came back, from the place that `push` returned."""
        at = place // self._segment - self._first
        if at >= 0:
            self._live[at] -= units
            self.taken += units

    def places(self, depths: Sequence[int]) -> list[int]:
        """Return, for each number of units, the place from which on so many have not come back: an object that left at
        this place or later would be in an L1 that is larger by as much. `depths` ascend."""
        newest_first = list(reversed(self._live))
        sums = list(accumulate(newest_first))
        places = []
        for depth in depths:
            at = bisect_left(sums, depth)
            begin = (self._first + max(len(sums) - 1 - at, 0)) * self._segment
            if at < len(sums) and newest_first[at]:
                end = begin + self._segment if at else self.pushed + 1
                begin += round((end - begin) * (sums[at] - depth) / newest_first[at])
            places.append(begin)
        return places


class CapacityCurve:
    """The hit rate of L1 over its capacity, which is given in units of the stack, from what lookups find among the
    ghosts: a chunk counts at the first capacity that would still hold it and all chunks before it. The curve holds for
    a policy by recency; for another one it is an estimate. Sums since the start."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._extra = [round(capacity * (2 ** (step / _STEPS_PER_DOUBLING) - 1)) for step in range(1, _STEPS + 1)]
        self.stack = EvictedStack(capacity // _SEGMENTS_PER_CAPACITY)
        # The oldest place of each capacity.
        self._places = self.stack.places(self._extra)
        self._moved = 0
        # Tokens of lookups, and those that L1 held.
        self.asked = self.hits = 0
        self._gained = [0] * _STEPS

    def missed(self, places: Iterable[float], tokens: int) -> None:
        """Count the chunks behind the hit of a lookup, each of `tokens` tokens, by their places in the stack, in the
        order of the prompt up to the first that no larger L1 would hold."""
        moved = self.stack.pushed + self.stack.taken
        if moved - self._moved > self._capacity // _STALE:
            self._moved = moved
            self._places = self.stack.places(self._extra)
        step = 0
        for place in places:
            while place < self._places[step]:
                step += 1
                if step == _STEPS:
                    return
            self._gained[step] += tokens

    def rates(self, unit: int, most: float) -> list[dict[str, float]]:
        """Return the capacities in bytes, of `unit` bytes a unit, and their hit rates: the present one first, then
        those that are larger by at most `most` units."""
        hits = accumulate(self._gained, initial=self.hits)
        return [
            {"capacity_bytes": (self._capacity + extra) * unit, "hit_rate": found / max(self.asked, 1)}
            for extra, found in zip((0, *self._extra), hits, strict=True)
            if extra <= most
        ]


class Ghost(NamedTuple):
    """A key that is not in L1. `cause` is one of `CAUSES`; `at` in seconds of the clock of the storage; `idle_s` is the
    time from the last use to the eviction; `by` is the model whose object took the place, "" if none did or it is not
    known."""

    cause: str
    at: float
    idle_s: float
    by: str


# What each ghost takes in CPython, the share of its dictionary included.
GHOST_BYTES = 256


class Facts(NamedTuple):
    """A ghost as it is kept: `place` and `units` are those in the stack of evicted bytes, 0 for none; `wanted`: a
    lookup or a store has asked for it."""

    cause: Cause
    at: float
    idle_s: float = 0.0
    by: str = ""
    place: int = 0
    units: int = 0
    wanted: bool = False


class Ghosts:
    """A bounded record of keys that left L1, or found no room in it, and why: of `most`, the newest half is always
    there. A key is known by its hash: of two keys with the same 64 bits, one takes the other's ghost, and nothing but
    an explanation is wrong."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._newer: dict[int, Facts] = {}
        self._older: dict[int, Facts] = {}

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def add(self, key: PackedKey, facts: Facts) -> None:
        """Record that `key`, which has no ghost, is not in L1 from now on."""
        if not self.most:
            return
        if len(self._newer) >= (self.most + 1) // 2:
            self._newer, self._older = {}, self._newer
        self._newer[hash(key)] = facts

    def get(self, key: PackedKey) -> Facts | None:
        code = hash(key)
        return self._newer.get(code) or self._older.get(code)

    def want(self, key: PackedKey) -> Facts | None:
        """Return what is known of a key that somebody asks for, as of before."""
        code = hash(key)
        half = self._newer if code in self._newer else self._older
        facts = half.get(code)
        if facts is not None and not facts.wanted:
            half[code] = facts._replace(wanted=True)
        return facts

    def forget(self, key: PackedKey) -> None:
        """Remove the ghost of a key that is in L1 again."""
        code = hash(key)
        if self._newer.pop(code, None) is None:
            del self._older[code]


_MOST_NAMESPACES = 4096
# Objects dropped by one store that are remembered: a lookup misses its first chunk first, of some groups.
MOST_DROPPED = 32
_FIRST_S = 0.1
_OCTAVES = 20

# The objects of one row by its key prefix and digests, None for each that L1 lacks; see `ObjectRows.row`.
FindRow = Callable[[bytes, Sequence[bytes]], "list[StoredObject | None]"]


class EvictionStatistics:
    """See the module. `capacity` in bytes; `most_ghosts` 0 keeps no ghosts, and without them no curve. `model_of` names
    the model of a namespace, "" for none."""

    def __init__(
        self, capacity: int, most_ghosts: int, model_of: Callable[[bytes], str], clock: Callable[[], float]
    ) -> None:
        self._ghosts = Ghosts(most_ghosts)
        self._curve = CapacityCurve(capacity // ALIGNMENT)
        self._evicted = [0] * len(EVICTIONS)
        self._idle = Histogram(_FIRST_S, _OCTAVES)
        self._wanted = Histogram(_FIRST_S, _OCTAVES)
        self._model_of = lru_cache(_MOST_NAMESPACES)(model_of)
        self._clock = clock

    def left(self, stored: StoredObject, cause: Cause, by: PackedKey | None = None) -> None:
        """Record an object that leaves L1, and `by` whose object it was replaced."""
        now = self._clock()
        if cause > LAST_EVICTION:
            self._ghosts.add(stored.key, Facts(cause, now))
            return
        idle_s, units = now - abs(stored.used), (stored.length + ALIGNMENT - 1) // ALIGNMENT
        self._evicted[cause] += 1
        self._idle.add(idle_s)
        model = "" if by is None else self._model_of(by[:NAMESPACE_BYTES])
        self._ghosts.add(stored.key, Facts(cause, now, idle_s, model, self._curve.stack.push(units), units))

    def lost(self, keys: Sequence[PackedKey], cause: Cause) -> None:
        """Record objects that did not get into L1: dropped, or damaged in a tier."""
        self.back(keys)
        now = self._clock()
        for key in keys:
            self._ghosts.add(key, Facts(cause, now))

    def back(self, keys: Sequence[PackedKey]) -> None:
        """Record objects that are in L1 again."""
        for key in keys if self._ghosts else ():
            facts = self._want(key)
            if facts is not None:
                self._ghosts.forget(key)
                if facts.place:
                    self._curve.stack.take(facts.place, facts.units)

    def looked_up(self, row_of: FindRow, prefix: bytes, digests: Sequence[bytes], hits: int, tokens: int) -> None:
        """Record a lookup of chunks of `tokens` tokens, of which the first `hits` are in L1. The row of `prefix` stands
        for all rows: objects of one chunk come and go together."""
        self._curve.asked += len(digests) * tokens
        self._curve.hits += hits * tokens
        if hits == len(digests) or not self._ghosts:
            return
        first = digests[hits]
        if row_of(prefix, [first])[0] is not None or self._want(prefix + first) is not None:
            self._curve.missed(self._places(row_of, prefix, digests[hits:]), tokens)

    def was_done(self, key: PackedKey) -> bool:
        """Whether a key that is not in L1 left it since no one was to ask again, as far as that is remembered."""
        facts = self._ghosts.get(key)
        return facts is not None and facts.cause is Cause.HINTED

    def ghost(self, key: PackedKey) -> Ghost | None:
        """Return the ghost of a key that is not in L1, None if there is none."""
        facts = self._ghosts.get(key)
        return None if facts is None else Ghost(CAUSES[facts.cause], facts.at, facts.idle_s, facts.by)

    def status(self) -> dict[str, object]:
        evicted, ghosts = sum(self._evicted), self._ghosts
        # In units of the stack, the evicted objects up to which next to none is forgotten.
        known = ghosts.most / 2 * (self._curve.stack.pushed / evicted if evicted else math.inf) if ghosts.most else 0.0
        return {
            "evicted": {CAUSES[cause]: self._evicted[cause] for cause in EVICTIONS},
            "evicted_idle_s": self._idle.octaves(),
            "wanted_after_eviction_s": self._wanted.octaves(),
            "ghosts": {"held": len(ghosts), "most": ghosts.most, "bytes": len(ghosts) * GHOST_BYTES},
            "more_capacity": self._curve.rates(ALIGNMENT, known),
        }

    def _places(self, row_of: FindRow, prefix: bytes, digests: Sequence[bytes]) -> Iterator[float]:
        """Yield the places of the chunks' objects, infinity for one that is here, up to the first that is neither here
        nor was evicted."""
        for stored, digest in zip(row_of(prefix, digests), digests, strict=True):
            facts = None if stored is not None else self._ghosts.get(prefix + digest)
            if stored is None and (facts is None or not facts.place):
                return
            yield math.inf if facts is None else facts.place

    def _want(self, key: PackedKey) -> Facts | None:
        facts = self._ghosts.want(key)
        if facts is not None and facts.place and not facts.wanted:
            self._wanted.add(self._clock() - facts.at)
        return facts
