"""The ghosts: a bounded record of keys that left L1, or found no room in it, and why. Pure.

A ghost costs `GHOST_BYTES` bytes, allocated at the start. It is found by the key's hash, which only this process can
compute; of two keys with the same 64 bits, one takes the other's ghost, and nothing but an explanation is wrong.

Each key has one set of `WAYS` places. A full set forgets its ghosts in turn, so that of n places about the n/2 newest
ghosts are surely there, and most of the others.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import NamedTuple

from kvframework.api.keys import PackedKey

WAYS = 16
_MARK_BYTES = 8
_EMPTY = bytes(_MARK_BYTES)
_SET_BYTES = WAYS * _MARK_BYTES
_NONE = -1
_WANTED = 0x80


class Cause(IntEnum):
    """Why L1 lacks an object."""

    # Evicted: for the place of another object, to get below the watermark, or by the share of its tenant.
    ROOM = 0
    WATERMARK = 1
    TENANT = 2
    CLEARED = 3
    # Its value in a tier was damaged.
    DAMAGED = 4
    # Never stored: L1 had no room, or the client had reserved its share.
    DROPPED_FULL = 5
    DROPPED_SHARE = 6


EVICTIONS = (Cause.ROOM, Cause.WATERMARK, Cause.TENANT)
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
    """The table of ghosts, of at least `most`; 0 keeps none. A place in the stack of evicted bytes is a number from 1,
    see `kvframework.storage.l1.evicted_stack`; 0 for a ghost that was not evicted."""

    def __init__(self, most: int) -> None:
        self._sets = -(-most // WAYS)
        self.most = self._sets * WAYS
        self.held = 0
        self._marks = bytearray(_MARK_BYTES * self.most)
        self._at = array("d", bytes(8 * self.most))
        self._idle = array("f", bytes(4 * self.most))
        self._place = array("Q", bytes(8 * self.most))
        self._units = array("I", bytes(4 * self.most))
        self._cause = bytearray(self.most)
        self._by = bytearray(self.most)
        # The place of each full set that is forgotten next.
        self._next = bytearray(self._sets)

    @property
    def nbytes(self) -> int:
        """The bytes that the table occupies, whatever it holds."""
        arrays = (self._at, self._idle, self._place, self._units)
        rows = (self._marks, self._cause, self._by, self._next)
        return sum(each.itemsize * len(each) for each in arrays) + sum(map(len, rows))

    def left(
        self, key: PackedKey, cause: Cause, now: float, idle_s: float = 0.0, by: int = 0, place: int = 0, units: int = 0
    ) -> None:
        """Record that `key` is not in L1 from now on. `by` is a number below 256, `units` the size of an evicted object
        in pages of the arena. 0.8 us."""
        if not self._sets:
            return
        code = hash(key)
        mark = code.to_bytes(_MARK_BYTES, "little", signed=True)
        chosen = code % self._sets
        index = self._find(mark, chosen)
        if index == _NONE:
            index = self._find(_EMPTY, chosen)
            if index == _NONE:
                way = self._next[chosen]
                self._next[chosen] = (way + 1) % WAYS
                index = chosen * WAYS + way
            else:
                self.held += 1
            self._marks[index * _MARK_BYTES : (index + 1) * _MARK_BYTES] = mark
        self._at[index] = now
        self._idle[index] = idle_s
        self._place[index] = place
        self._units[index] = units
        self._cause[index] = cause
        self._by[index] = by

    def slot(self, key: PackedKey) -> int:
        """Return the index of the key's ghost, valid until the next change; -1 for none. 0.3 us."""
        if not self._sets:
            return _NONE
        code = hash(key)
        return self._find(code.to_bytes(_MARK_BYTES, "little", signed=True), code % self._sets)

    def place(self, slot: int) -> int:
        """Return the place of a ghost in the stack of evicted bytes, 0 for none."""
        return self._place[slot]

    def units(self, slot: int) -> int:
        return self._units[slot]

    def facts(self, slot: int) -> tuple[Cause, float, float, int]:
        """Return cause, time, idle seconds, and by whom."""
        return Cause(self._cause[slot] & ~_WANTED), self._at[slot], self._idle[slot], self._by[slot]

    def want(self, slot: int, now: float) -> float | None:
        """Return the seconds since the ghost's object was evicted; None if that was asked before, or it was not
        evicted."""
        cause = self._cause[slot]
        self._cause[slot] = cause | _WANTED
        return now - self._at[slot] if cause <= Cause.TENANT else None

    def forget(self, slot: int) -> None:
        """Remove a ghost: its object is in L1 again."""
        self._marks[slot * _MARK_BYTES : (slot + 1) * _MARK_BYTES] = _EMPTY
        self.held -= 1

    def _find(self, mark: bytes, chosen: int) -> int:
        first = chosen * _SET_BYTES
        end = first + _SET_BYTES
        found = self._marks.find(mark, first, end)
        while found % _MARK_BYTES and found != _NONE:
            found = self._marks.find(mark, found + 1, end)
        return found // _MARK_BYTES


GHOST_BYTES = Ghosts(WAYS).nbytes // WAYS
