"""A set of 64-bit keys of fixed size, in one numpy array. Pure.

A dictionary of integers takes about 100 bytes an entry and a microsecond to ask for a few; this takes 8 bytes a slot,
and thousands of keys are asked for in one call.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Keys: TypeAlias = npt.NDArray[np.uint64]
Slots: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

ABSENT = -1
_WIDTH = 8  # slots of a bucket: one cache line
_LOAD = 0.7  # how full it gets before keys find both of their buckets full
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_SLICE = 1 << 14  # keys whose candidates, 128 bytes each, stay in a core's cache


class Table:
    """Room for at least `keys` keys, which are random 64-bit numbers but 0.

    A key lies in one of two buckets that its halves name, in the emptier one when it came. So nothing ever moves, a
    search reads two cache lines, and removals leave nothing behind. The memory is the kernel's until it is used.
    """

    def __init__(self, keys: int) -> None:
        self._buckets = int(keys / _LOAD) // _WIDTH + 2
        self._keys = np.zeros((self._buckets, _WIDTH), np.uint64)
        self.slots = self._keys.size
        self.bytes = self._keys.nbytes

    def find(self, keys: Keys) -> Slots:
        """The slot of each key, `ABSENT` for one that is not here."""
        found = np.empty(len(keys), np.int64)
        for begin in range(0, len(keys), _SLICE):
            part = keys[begin : begin + _SLICE]
            buckets = self._candidates(part)
            found[begin : begin + _SLICE] = _slots(buckets, self._keys[buckets], part)
        return found

    def add(self, keys: Keys) -> tuple[Slots, Flags]:
        """The slot of each key, which is made for one that is not here, `ABSENT` if both its buckets are full; and
        whether it was made. A key may come twice."""
        buckets = self._candidates(keys)
        held = self._keys[buckets]
        slots = _slots(buckets, held, keys)
        new = slots == ABSENT
        lacking = np.flatnonzero(new)
        buckets, held = buckets[lacking], held[lacking]
        flat = self._keys.reshape(-1)
        while lacking.size:
            wanted = keys[lacking]
            free = held == 0
            rooms = free.sum(2)
            second = (rooms[:, 1] > rooms[:, 0]).astype(np.int64)
            row = np.arange(len(wanted))
            slot = buckets[row, second] * _WIDTH + free[row, second].argmax(1)
            fits = rooms[row, second] > 0
            flat[slot[fits]] = wanted[fits]
            # Of keys that chose the same slot the last one gets it; the others choose again.
            got = fits & (flat[slot] == wanted)
            slots[lacking[got]] = slot[got]
            again = fits & ~got
            lacking, buckets = lacking[again], buckets[again]
            held = self._keys[buckets]
        return slots, new & (slots != ABSENT)

    def occupied(self, slots: Slots) -> Flags:
        occupied: Flags = self._keys.reshape(-1)[slots] != 0
        return occupied

    def discard(self, slots: Slots) -> None:
        self._keys.reshape(-1)[slots] = 0

    def _candidates(self, keys: Keys) -> Slots:
        """The two buckets of each key, in rows: each half of it as a fraction of all buckets."""
        buckets = np.empty((len(keys), 2), np.int64)
        buckets[:, 0] = ((keys >> _HALF) * np.uint64(self._buckets)) >> _HALF
        buckets[:, 1] = ((keys & _LOW) * np.uint64(self._buckets)) >> _HALF
        return buckets


def _slots(buckets: Slots, held: Keys, keys: Keys) -> Slots:
    """Where the keys are among what their buckets hold."""
    equal = (held == keys[:, None, None]).reshape(len(keys), 2 * _WIDTH)
    at = equal.argmax(1)
    row = np.arange(len(keys))
    slots: Slots = buckets[row, at // _WIDTH] * _WIDTH + at % _WIDTH
    slots[~equal[row, at]] = ABSENT
    return slots
