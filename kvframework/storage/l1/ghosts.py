"""The ghosts: a bounded record of keys that left L1, or found no room in it, and why. Pure.

A ghost has `GHOST_BYTES` bytes, allocated at the start. It is found by the key's hash, which only this process can
compute; of two keys with the same 64 bits, one takes the other's ghost, and nothing but an explanation is wrong.

Each key has one set of `WAYS` places; a full set forgets its oldest ghost. So of n ghosts the newest n/2 are there but
for one in a hundred.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from kvframework.api.keys import PackedKey

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
