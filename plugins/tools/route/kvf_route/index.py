"""Which place holds which blocks: the state behind every score. Pure.

A **place** is what one publisher says of one tier. A block has two names: the hash that its publisher gave it
(`external`), which is all that a removal says, and the hash that its tokens make (`own`), by which requests ask. Both
are 64-bit. One table maps a place's external hashes to own ones, another counts a place's own ones, since two external
hashes may stand for the same tokens. 28 bytes a slot, 40 a block of a full index, whatever the number of places.

A set of 64-bit keys of fixed size, in one numpy array. Pure.

A dictionary of integers takes about 100 bytes an entry and a microsecond to ask for a few; this takes 8 bytes a slot,
and thousands of keys are asked for in one call.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

MOST_PLACES = 1 << 16
MOST_OF_ONE = 1 << 8  # of one owner, with those that are closed and not swept yet
_MOST_EQUAL = 60_000  # external hashes of one place for the same tokens; the count has 16 bits
_AT_ONCE = 4096  # blocks of one step, so that a count cannot pass its bits within it
_SWEPT = 1 << 15  # slots of one step of a sweep
_NONZERO = np.uint64(1)


class Index:
    """Room for `blocks` blocks, each counted once for each place that holds it. Not thread-safe."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._externals = Table(blocks)
        self._owns = np.zeros(self._externals.slots, np.uint64)
        self._places = np.zeros(self._externals.slots, np.uint16)
        self._held = Table(blocks)
        self._counts = np.zeros(self._held.slots, np.uint16)
        # By place: the number that keeps its keys apart from those of all others, and how many blocks it has.
        self._salts = np.zeros(MOST_PLACES, np.uint64)
        self._sizes: list[int] = []
        self._free: list[int] = []
        self._owners: dict[int, Hashable] = {}
        self._owned: Counter[Hashable] = Counter()
        # Places that are closed, those of which the pass under way frees the slots, and how far it is.
        self._closed: list[int] = []
        self._sweeping: list[int] = []
        self._swept = 0

    @property
    def bytes(self) -> int:
        own = self._owns.nbytes + self._places.nbytes + self._counts.nbytes
        return self._externals.bytes + self._held.bytes + own

    def open(self, owner: Hashable = None) -> int | None:
        """A new place, without blocks; None if there are `MOST_PLACES`, or `MOST_OF_ONE` of that owner."""
        full = not self._free and len(self._sizes) == MOST_PLACES
        if full or (owner is not None and self._owned[owner] == MOST_OF_ONE):
            return None
        place = self._free.pop() if self._free else len(self._sizes)
        if place == len(self._sizes):
            self._sizes.append(0)
        self._owners[place] = owner
        self._owned[owner] += 1
        self._salts[place] = secrets.randbits(64)
        return place

    def size(self, place: int) -> int:
        """How many blocks the place holds."""
        return self._sizes[place]

    def store(self, place: int, externals: Keys, owns: Keys) -> int:
        """The place holds these blocks; an external hash that it has gets its new meaning. An external hash comes once
        in a call. Returns how many found no room."""
        refused = 0
        for begin in range(0, len(externals), _AT_ONCE):
            refused += self._store(place, externals[begin : begin + _AT_ONCE], owns[begin : begin + _AT_ONCE])
        return refused

    def remove(self, place: int, externals: Keys) -> int:
        """The place does not hold these blocks any more. Returns how many it held."""
        slots = np.unique(self._externals.find(self._external_keys(place, externals)))
        slots = slots[slots != ABSENT]
        self._forget(place, slots)
        return len(slots)

    def close(self, places: Sequence[int]) -> None:
        """Drop the places and all their blocks. Their room is free, and so are their numbers, once `sweep` has been
        everywhere."""
        self._closed += places

    def sweep(self) -> bool:
        """Free what closed places held in a part of the index; takes about a millisecond. True if there is more."""
        if not self._sweeping:
            self._sweeping, self._closed, self._swept = self._closed, [], 0
        if not self._sweeping:
            return False
        begin, self._swept = self._swept, self._swept + _SWEPT
        slots = np.flatnonzero(np.isin(self._places[begin : self._swept], np.array(self._sweeping, np.uint16))) + begin
        slots = slots[self._externals.occupied(slots)]
        for place in np.unique(self._places[slots]).tolist():
            self._forget(place, slots[self._places[slots] == place])
        if self._swept >= self._externals.slots:
            self._free += self._sweeping
            self._owned -= Counter(map(self._owners.pop, self._sweeping))
            self._sweeping = []
        return bool(self._sweeping or self._closed)

    def own(self, places: Sequence[int], externals: Keys) -> tuple[Flags, Keys]:
        """Whether any of the places has each external hash, and its own hash."""
        known = np.zeros(len(externals), np.bool_)
        owns = np.zeros(len(externals), np.uint64)
        for place in places:
            slots = self._externals.find(self._external_keys(place, externals))
            here = slots != ABSENT
            owns[here] = self._owns[slots[here]]
            known |= here
        return known, owns

    def holds(self, places: Sequence[int], owns: Keys) -> Flags:
        """Whether each place, a row, holds each block, a column."""
        keys = owns[None, :] ^ self._salts[np.asarray(places, np.int64)][:, None]
        found: Flags = self._held.find(_nonzero(keys.reshape(-1))) != ABSENT
        return found.reshape(keys.shape)

    def holds_externals(self, places: Sequence[int], externals: Keys) -> Flags:
        """As `holds`, by external hashes."""
        rows = [self._externals.find(self._external_keys(place, externals)) != ABSENT for place in places]
        return np.stack(rows) if rows else np.zeros((0, len(externals)), np.bool_)

    def _store(self, place: int, externals: Keys, owns: Keys) -> int:
        slots, new = self._externals.add(self._external_keys(place, externals))
        here = slots != ABSENT
        renamed = here & ~new
        renamed[renamed] = self._owns[slots[renamed]] != owns[renamed]
        self._uncount(place, slots[renamed])
        wanted = new | renamed
        slots, owns, renamed = slots[wanted], owns[wanted], renamed[wanted]

        held, _ = self._held.add(_nonzero(owns ^ self._salts[place]))
        fits = held != ABSENT
        fits[fits] = self._counts[held[fits]] < _MOST_EQUAL
        np.add.at(self._counts, held[fits], 1)
        unused = held[~fits & (held != ABSENT)]
        self._held.discard(unused[self._counts[unused] == 0])
        self._externals.discard(slots[~fits])
        self._owns[slots[fits]] = owns[fits]
        self._places[slots[fits]] = place
        self._sizes[place] += int(fits.sum()) - int(renamed.sum())
        return len(externals) - int(here.sum()) + int((~fits).sum())

    def _forget(self, place: int, slots: Slots) -> None:
        """Free these slots of the place, none twice."""
        self._uncount(place, slots)
        self._externals.discard(slots)
        self._sizes[place] -= len(slots)

    def _uncount(self, place: int, slots: Slots) -> None:
        """Count the blocks of these slots no more, none twice."""
        held = self._held.find(_nonzero(self._owns[slots] ^ self._salts[place]))
        np.subtract.at(self._counts, held, 1)
        self._held.discard(held[self._counts[held] == 0])

    def _external_keys(self, place: int, externals: Keys) -> Keys:
        """Random numbers, however the publisher chose its hashes: the finalizer of splitmix64."""
        mixed = externals ^ self._salts[place]
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return _nonzero(mixed ^ (mixed >> np.uint64(31)))


def _nonzero(keys: Keys) -> Keys:
    """No key is 0, which marks a free slot."""
    return np.maximum(keys, _NONZERO)


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
