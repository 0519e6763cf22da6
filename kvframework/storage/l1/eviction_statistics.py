"""What left L1: how many objects for which cause, how long unused, how soon wanted again, and which hits a larger L1
would give. Pure. An eviction costs 2 us, a lookup that hits 0.2 us, each evicted chunk that a lookup misses 0.5 us."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import accumulate
from struct import Struct
from typing import NamedTuple

from kvframework.api.counter import Histogram
from kvframework.api.keys import PackedKey
from kvframework.storage.l1.entries import ALIGNMENT, StoredObject

# The stack of evicted bytes: how many bytes have left L1 since an object left, without those that came back. Pure.
#
# Under a policy by recency, the objects of L1 and then those that left it, the last first, are the stack of a larger
# L1: an object would still be there if L1 were larger by the bytes that were evicted from it on and have not come back.
#
# The stack is kept in segments of about equal bytes, so it is right to a fraction of a segment.

# Segments, before neighbours that have become small are merged.
_MOST_SEGMENTS = 512


class EvictedStack:
    """Bytes are counted in units of the caller. `segment` is the size of a segment; what is deeper than `reach` is
    forgotten. A place is a number from 1, larger for what left later."""

    def __init__(self, segment: int, reach: int) -> None:
        self._segment = max(segment, 1)
        self._reach = reach
        self._top = 1
        # Of each segment, the oldest first: the place where it begins, and the units in it that have not come back.
        self._starts = [1]
        self._live = [0]
        self._taken = 0

    @property
    def pushed(self) -> int:
        """The units that were ever added."""
        return self._top - 1

    @property
    def moved(self) -> int:
        """The units that were ever added or removed: how far earlier `places` may be from those of now."""
        return self.pushed + self._taken

    def push(self, units: int) -> int:
        """Add the units of an object that is evicted; return its place."""
        place = self._top
        self._top += units
        self._live[-1] += units
        if self._top - self._starts[-1] >= self._segment:
            self._starts.append(self._top)
            self._live.append(0)
            if len(self._starts) > _MOST_SEGMENTS:
                self._merge()
        return place

    def take(self, place: int, units: int) -> None:
        """Remove the units of an object that came back, from the place that `push` returned."""
        if place >= self._starts[0]:
            self._live[bisect_right(self._starts, place) - 1] -= units
            self._taken += units

    def places(self, depths: Sequence[int]) -> list[int]:
        """Return, for each number of units, the place from which on so many have not come back: an object that left at
        this place or later would be in an L1 that is larger by as much. `depths` ascend."""
        newest_first = self._live[::-1]
        sums = list(accumulate(newest_first))
        places = []
        for depth in depths:
            at = bisect_left(sums, depth)
            if at == len(sums):
                places.append(self._starts[0])
                continue
            index = len(sums) - 1 - at
            begin = self._starts[index]
            end = self._starts[index + 1] if at else self._top
            over = (sums[at] - depth) / newest_first[at] if newest_first[at] else 0.0
            places.append(begin + round((end - begin) * over))
        return places

    def _merge(self) -> None:
        """Merge neighbours that are together no larger than a segment, and forget what is beyond the reach."""
        starts, live = [self._starts[-1]], [self._live[-1]]
        total = live[0]
        for start, units in zip(self._starts[-2::-1], self._live[-2::-1], strict=True):
            if total > self._reach:
                break
            total += units
            if len(live) > 1 and live[-1] + units <= self._segment:
                starts[-1] = start
                live[-1] += units
            else:
                starts.append(start)
                live.append(units)
        self._starts, self._live = starts[::-1], live[::-1]


# The curve of the hit rate of L1 over its capacity, from what lookups find among the ghosts. Pure.
#
# A chunk of a lookup counts at the first capacity that would still hold it and all chunks before it. The curve holds
# for a policy by recency; for another one it is an estimate.

# The capacities: four steps for each doubling, up to eight times the present one.
_STEPS = 12
_STEPS_PER_DOUBLING = 4
_SEGMENTS_PER_CAPACITY = 16
# Places are computed again after this share of a capacity has been evicted or has come back.
_STALE = 64


class CapacityCurve:
    """Sums since the start. `capacity` is L1's, in the units of the stack."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._extra = [round(capacity * (2 ** (step / _STEPS_PER_DOUBLING) - 1)) for step in range(1, _STEPS + 1)]
        self.stack = EvictedStack(capacity // _SEGMENTS_PER_CAPACITY, self._extra[-1])
        # The oldest place of each capacity.
        self._places = self.stack.places(self._extra)
        self._moved = 0
        self._asked = 0
        self._hits = 0
        self._gained = [0] * _STEPS

    def looked_up(self, asked: int, hits: int) -> None:
        """Count a lookup's tokens, and those that L1 holds."""
        self._asked += asked
        self._hits += hits

    def missed(self, places: Iterable[float], tokens: int) -> None:
        """Count the chunks behind the hit of a lookup, each of `tokens` tokens, by their places in the stack, in the
        order of the prompt up to the first that no larger L1 would hold."""
        if self.stack.moved - self._moved > self._capacity // _STALE:
            self._moved = self.stack.moved
            self._places = self.stack.places(self._extra)
        step, least, oldest = 0, self._places[0], self._places[-1]
        for place in places:
            if place < least:
                if place < oldest:
                    return
                while place < self._places[step]:
                    step += 1
                least = self._places[step]
            self._gained[step] += tokens

    def rates(self, unit: int, most: float) -> list[dict[str, float]]:
        """Return the capacities in bytes, of `unit` bytes a unit, and their hit rates: the present one first, then
        those that are larger by at most `most` units."""
        asked = max(self._asked, 1)
        hits = self._hits
        rows: list[dict[str, float]] = [{"capacity_bytes": self._capacity * unit, "hit_rate": hits / asked}]
        for extra, gained in zip(self._extra, self._gained, strict=True):
            if extra > most:
                break
            hits += gained
            rows.append({"capacity_bytes": (self._capacity + extra) * unit, "hit_rate": hits / asked})
        return rows


# The ghosts: a bounded record of keys that left L1, or found no room in it, and why. Pure.
#
# A ghost has `GHOST_BYTES` bytes, allocated at the start. It is found by the key's hash, which only this process can
# compute; of two keys with the same 64 bits, one takes the other's ghost, and nothing but an explanation is wrong.
#
# Each key has one set of `WAYS` places; a full set forgets its oldest ghost. So of n ghosts the newest n/2 are there
# but for one in a hundred.

WAYS = 16
# Of each ghost: the mark of its key; time, idle seconds, units, and place in the stack x 2^16 + cause x 2^8 + model.
_MARK = Struct("=q")
_FACTS = Struct("=dfIQ")
_LAST = Struct("=Q")
GHOST_BYTES = _MARK.size + _FACTS.size
_LAST_AT = _FACTS.size - _LAST.size
_MARKS = WAYS * _MARK.size
# From the place of a mark to that of its facts.
_TIMES = _FACTS.size // _MARK.size
_WANTED = 0x80 << 8

_mark_of = _MARK.pack


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


class Ghost(NamedTuple):
    """A key that is not in L1. `cause` is one of `CAUSES`; `at` in seconds of the clock of the storage; `idle_s` is the
    time from the last use to the eviction; `by` is the model whose object took the place, "" if none did or it is not
    known."""

    cause: str
    at: float
    idle_s: float
    by: str


class Ghosts:
    """The table of ghosts: `most` rounded up to a power of two, or `WAYS`; 0 keeps none. A slot is the place of a ghost
    until the next change."""

    def __init__(self, most: int) -> None:
        sets = 1 << (-(-most // WAYS) - 1).bit_length() if most else 0
        self.most = sets * WAYS
        self.held = 0
        # The sets one after the other.
        self._marks = bytearray(_MARK.size * self.most)
        self._numbers = memoryview(self._marks).cast("q")
        self._facts = memoryview(bytearray(_FACTS.size * self.most))
        # Of each set, its next place: from there on, in a circle, follow the free places, then the ghosts by age.
        self._next = bytearray(sets)
        # Of a key's hash, the bits that are the offset of its set in `_marks`.
        self._offset = max(sets - 1, 0) * _MARKS

    @property
    def nbytes(self) -> int:
        """The bytes that the table occupies, whatever it holds."""
        return len(self._marks) + len(self._facts) + len(self._next)

    def left(
        self, key: PackedKey, cause: Cause, now: float, idle_s: float = 0.0, by: int = 0, place: int = 0, units: int = 0
    ) -> None:
        """Record that `key`, which has no ghost, is not in L1 from now on. `by` is a number below 256; `place` and
        `units` are those of the object in the stack of evicted bytes, 0 for none. 0.5 us."""
        if not self.most:
            return
        code = hash(key)
        number = (code & self._offset) // _MARKS
        way = self._next[number]
        self._next[number] = (way + 1) % WAYS
        at = number * WAYS + way
        if not self._numbers[at]:
            self.held += 1
        self._numbers[at] = code
        _FACTS.pack_into(self._facts, at * _FACTS.size, now, idle_s, units, place << 16 | cause << 8 | by)

    def slot(self, key: PackedKey) -> int:
        """Return the slot of the key's ghost, -1 for none. 0.3 us."""
        code = hash(key)
        first = code & self._offset
        mark = _mark_of(code)
        slot = self._marks.find(mark, first, first + _MARKS)
        while slot > 0 and slot % _MARK.size:
            slot = self._marks.find(mark, slot + 1, first + _MARKS)
        return slot

    def place(self, slot: int) -> int:
        """Return the place of a ghost in the stack of evicted bytes, 0 for none."""
        last: int = _LAST.unpack_from(self._facts, slot * _TIMES + _LAST_AT)[0]
        return last >> 16

    def facts(self, slot: int) -> tuple[int, float, float, int]:
        """Return the number of the cause, time, idle seconds, and by whom."""
        at, idle_s, _, last = _FACTS.unpack_from(self._facts, slot * _TIMES)
        return last >> 8 & 0x7F, at, idle_s, last & 0xFF

    def want(self, slot: int, now: float) -> float | None:
        """Return the seconds since the ghost's object was evicted; None if that was asked before, or it was not
        evicted."""
        at, _, _, last = _FACTS.unpack_from(self._facts, slot * _TIMES)
        _LAST.pack_into(self._facts, slot * _TIMES + _LAST_AT, last | _WANTED)
        return None if last & _WANTED or not last >> 16 else now - at

    def forget(self, slot: int) -> tuple[int, int]:
        """Remove a ghost, since its object is in L1 again; return its place in the stack of evicted bytes, 0 for none,
        and its units there."""
        _, _, units, last = _FACTS.unpack_from(self._facts, slot * _TIMES)
        at = slot // _MARK.size
        first, end = at - at % WAYS, at - at % WAYS + WAYS - 1
        free = first + self._next[first // WAYS]
        if free <= at:
            self._move(free, at, free + 1)
        else:
            self._move(first, at, first + 1)
            self._move(end, end + 1, first)
            self._move(free, end, free + 1)
        self._numbers[free] = 0
        self.held -= 1
        return last >> 16, units

    def _move(self, first: int, end: int, to: int) -> None:
        """Move the ghosts of a range of places."""
        marks, facts, size = self._numbers, self._facts, _FACTS.size
        marks[to : to + end - first] = marks[first:end]
        facts[to * size : (to + end - first) * size] = facts[first * size : end * size]


# A ghost has one byte for the model.
_MOST_MODELS = 255
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
        self._model_of = model_of
        self._clock = clock
        self._models = [""]
        self._model_ids: dict[bytes, int] = {}

    def left(self, stored: StoredObject, cause: Cause, by: PackedKey | None = None) -> None:
        """Record an object that leaves L1, and `by` whose object it was replaced."""
        now = self._clock()
        if cause > LAST_EVICTION:
            self._ghosts.left(stored.key, cause, now)
            return
        self._evicted[cause] += 1
        idle_s = now - abs(stored.used)
        self._idle.add(idle_s)
        if self._ghosts.most:
            units = (stored.length + ALIGNMENT - 1) // ALIGNMENT
            # No call for a model that is known.
            model = 0 if by is None else self._model_ids.get(by[:16]) or self._model_id(by)
            self._ghosts.left(stored.key, cause, now, idle_s, model, self._curve.stack.push(units), units)

    def lost(self, keys: Sequence[PackedKey], cause: Cause) -> None:
        """Record objects that did not get into L1: dropped, or damaged in a tier."""
        self.back(keys)
        now = self._clock()
        for key in keys:
            self._ghosts.left(key, cause, now)

    def back(self, keys: Sequence[PackedKey]) -> None:
        """Record objects that are in L1 again."""
        if not self._ghosts.held:
            return
        now = self._clock()
        for key in keys:
            slot = self._ghosts.slot(key)
            if slot >= 0:
                self._want(slot, now)
                place, units = self._ghosts.forget(slot)
                if place:
                    self._curve.stack.take(place, units)

    def looked_up(self, row_of: FindRow, prefix: bytes, digests: Sequence[bytes], hits: int, tokens: int) -> None:
        """Record a lookup of chunks of `tokens` tokens, of which the first `hits` are in L1. The row of `prefix` stands
        for all rows: objects of one chunk come and go together."""
        self._curve.looked_up(len(digests) * tokens, hits * tokens)
        if hits == len(digests) or not self._ghosts.held:
            return
        first = digests[hits]
        if row_of(prefix, [first])[0] is None:
            slot = self._ghosts.slot(prefix + first)
            if slot < 0:
                return
            self._want(slot, self._clock())
        self._curve.missed(self._places(row_of, prefix, digests[hits:]), tokens)

    def was_done(self, key: PackedKey) -> bool:
        """Whether a key that is not in L1 left it since no one was to ask again, as far as that is remembered."""
        slot = self._ghosts.slot(key)
        return slot >= 0 and self._ghosts.facts(slot)[0] == Cause.HINTED

    def ghost(self, key: PackedKey) -> Ghost | None:
        """Return the ghost of a key that is not in L1, None if there is none."""
        slot = self._ghosts.slot(key)
        if slot < 0:
            return None
        cause, at, idle_s, by = self._ghosts.facts(slot)
        return Ghost(CAUSES[cause], at, idle_s, self._models[by])

    def status(self) -> dict[str, object]:
        return {
            "evicted": {CAUSES[cause]: self._evicted[cause] for cause in EVICTIONS},
            "evicted_idle_s": self._idle.octaves(),
            "wanted_after_eviction_s": self._wanted.octaves(),
            "ghosts": {"held": self._ghosts.held, "most": self._ghosts.most, "bytes": self._ghosts.nbytes},
            "more_capacity": self._curve.rates(ALIGNMENT, self._reach()),
        }

    def _reach(self) -> float:
        """Return the units of evicted objects up to which next to none is forgotten."""
        evicted = sum(self._evicted)
        units = self._curve.stack.pushed / evicted if evicted else math.inf
        return units * self._ghosts.most / 2 if self._ghosts.most else 0.0

    def _places(self, row_of: FindRow, prefix: bytes, digests: Sequence[bytes]) -> Iterator[float]:
        """Yield the places of the chunks' objects, infinity for one that is here, up to the first that is neither here
        nor was evicted."""
        for stored, digest in zip(row_of(prefix, digests), digests, strict=True):
            if stored is not None:
                yield math.inf
                continue
            slot = self._ghosts.slot(prefix + digest)
            place = self._ghosts.place(slot) if slot >= 0 else 0
            if not place:
                return
            yield place

    def _want(self, slot: int, now: float) -> None:
        after = self._ghosts.want(slot, now)
        if after is not None:
            self._wanted.add(after)

    def _model_id(self, key: PackedKey) -> int:
        """Return the number of the model whose object `key` names; 0 beyond the bound."""
        namespace = key[:16]
        known = self._model_ids.get(namespace)
        if known is None:
            name = self._model_of(namespace)
            if name not in self._models and len(self._models) <= _MOST_MODELS:
                self._models.append(name)
            known = self._models.index(name) if name in self._models else 0
            if len(self._model_ids) >= _MOST_NAMESPACES:
                self._model_ids.clear()
            self._model_ids[namespace] = known
        return known
