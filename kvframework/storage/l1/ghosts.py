"""The ghosts: a bounded record of keys that left L1, or found no room in it, and why. Pure.

A ghost has `GHOST_BYTES` bytes, allocated at the start. It is found by the key's hash, which only this process can
compute; of two keys with the same 64 bits, one takes the other's ghost, and nothing but an explanation is wrong.

Each key has one set of `WAYS` places, the newest ghost first; a full set forgets its oldest. So of n ghosts the newest
n/2 are there but for one in a hundred.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from kvframework.api.keys import PackedKey

WAYS = 16
# A place: mark, time, idle seconds, units, and place in the stack x 2^16 + cause x 2^8 + model.
_ROW = Struct("<8sdfIQ")
_FACTS = Struct("<dfIQ")
_LAST = Struct("<Q")
GHOST_BYTES = _ROW.size
_MARK_BYTES = 8
_LAST_AT = GHOST_BYTES - _LAST.size
_SET_BYTES = WAYS * GHOST_BYTES
_EMPTY = bytes(GHOST_BYTES)
_WANTED = 0x80 << 8


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
    """The table of ghosts, of at least `most`; 0 keeps none. A slot is the place of a ghost until the next change."""

    def __init__(self, most: int) -> None:
        self._sets = -(-most // WAYS)
        self.most = self._sets * WAYS
        self.held = 0
        self._rows = bytearray(_SET_BYTES * self._sets)

    @property
    def nbytes(self) -> int:
        """The bytes that the table occupies, whatever it holds."""
        return len(self._rows)

    def left(
        self, key: PackedKey, cause: Cause, now: float, idle_s: float = 0.0, by: int = 0, place: int = 0, units: int = 0
    ) -> None:
        """Record that `key`, which has no ghost, is not in L1 from now on. `by` is a number below 256; `place` and
        `units` are those of the object in the stack of evicted bytes, 0 for none. 0.6 us."""
        if not self._sets:
            return
        code = hash(key)
        first = code % self._sets * _SET_BYTES
        end = first + _SET_BYTES
        rows = self._rows
        self.held += rows.startswith(_EMPTY, end - GHOST_BYTES)
        rows[first + GHOST_BYTES : end] = rows[first : end - GHOST_BYTES]
        mark = code.to_bytes(_MARK_BYTES, "little", signed=True)
        _ROW.pack_into(rows, first, mark, now, idle_s, units, place << 16 | cause << 8 | by)

    def slot(self, key: PackedKey) -> int:
        """Return the slot of the key's ghost, -1 for none. 0.3 us."""
        if not self._sets:
            return -1
        code = hash(key)
        first = code % self._sets * _SET_BYTES
        mark = code.to_bytes(_MARK_BYTES, "little", signed=True)
        slot = self._rows.find(mark, first, first + _SET_BYTES)
        while slot % GHOST_BYTES and slot >= 0:
            slot = self._rows.find(mark, slot + 1, first + _SET_BYTES)
        return slot

    def place(self, slot: int) -> int:
        """Return the place of a ghost in the stack of evicted bytes, 0 for none."""
        last: int = _LAST.unpack_from(self._rows, slot + _LAST_AT)[0]
        return last >> 16

    def facts(self, slot: int) -> tuple[Cause, float, float, int]:
        """Return cause, time, idle seconds, and by whom."""
        now, idle_s, _, last = _FACTS.unpack_from(self._rows, slot + _MARK_BYTES)
        return Cause(last >> 8 & 0x7F), now, idle_s, last & 0xFF

    def want(self, slot: int, now: float) -> float | None:
        """Return the seconds since the ghost's object was evicted; None if that was asked before, or it was not
        evicted."""
        at, _, _, last = _FACTS.unpack_from(self._rows, slot + _MARK_BYTES)
        _LAST.pack_into(self._rows, slot + _LAST_AT, last | _WANTED)
        return None if last & _WANTED or not last >> 16 else now - at

    def forget(self, slot: int) -> tuple[int, int]:
        """Remove a ghost, since its object is in L1 again; return its place in the stack of evicted bytes, 0 for none,
        and its units there."""
        _, _, units, last = _FACTS.unpack_from(self._rows, slot + _MARK_BYTES)
        end = slot - slot % _SET_BYTES + _SET_BYTES
        self._rows[slot : end - GHOST_BYTES] = self._rows[slot + GHOST_BYTES : end]
        self._rows[end - GHOST_BYTES : end] = _EMPTY
        self.held -= 1
        return last >> 16, units
