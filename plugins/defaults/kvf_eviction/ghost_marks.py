"""The ghosts of `two_queues`: a mark for each of the keys that left L1 last. Pure.

A key has one set of `WAYS` places, found by its hash; a new ghost takes the place of the oldest one of its set. Of a
full table the newest half is there but for one in a hundred, and no other is used: ghosts of one prompt are forgotten
together, since a part of it that counts as used again, behind a part that does not, would be of no use. Two keys of the
same hash are one ghost; then a number is wrong, and nothing else.
"""

from __future__ import annotations

from array import array
from struct import Struct

from kvframework.api.eviction import PackedKey

WAYS = 16
MARK_BITS = 32
_CODE = Struct("=q")
_SET_BYTES = WAYS * _CODE.size
_COUNT = (1 << 31) - 1
_pack = _CODE.pack


class GhostMarks:
    """The last `most` ghosts, a power of two of at least `WAYS`, in 32 bytes each. A mark has `MARK_BITS`
    bits."""

    def __init__(self, most: int) -> None:
        self.most = most
        places = 2 * most
        self._codes = bytearray(_CODE.size * places)
        # The number of the ghost, and its mark.
        self._marks = array("q", bytes(8 * places))
        # Of each set the way that the next ghost takes.
        self._next = bytearray(places // WAYS)
        self._sets = places // WAYS - 1
        self._count = 0

    @property
    def nbytes(self) -> int:
        return len(self._codes) + 8 * len(self._marks) + len(self._next)

    def add(self, key: PackedKey, mark: int) -> None:
        """Remember a key that has no ghost. 0.4 us."""
        code = hash(key)
        number = code & self._sets
        way = self._next[number]
        self._next[number] = (way + 1) % WAYS
        place = number * WAYS + way
        _CODE.pack_into(self._codes, place * _CODE.size, code)
        self._count = count = self._count + 1 & _COUNT
        self._marks[place] = count << MARK_BITS | mark

    def take(self, key: PackedKey) -> int:
        """Forget the ghost of a key; return its mark, -1 for none. 0.3 us."""
        code = hash(key)
        first = (code & self._sets) * _SET_BYTES
        packed = _pack(code)
        at = self._codes.find(packed, first, first + _SET_BYTES)
        while at > 0 and at % _CODE.size:
            at = self._codes.find(packed, at + 1, first + _SET_BYTES)
        if at < 0:
            return -1
        _CODE.pack_into(self._codes, at, 0)
        mark = self._marks[at // _CODE.size]
        newer = self._count - (mark >> MARK_BITS) & _COUNT
        return mark & (1 << MARK_BITS) - 1 if newer < self.most else -1
