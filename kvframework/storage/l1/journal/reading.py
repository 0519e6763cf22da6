"""What a journal says that L1 holds. Pure, over the bytes of the journal; whatever is in doubt makes all of it
worthless."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import chain, compress, repeat
from operator import eq, itemgetter
from typing import Any, NamedTuple

import xxhash

from kvframework.api.keys import PACKED_KEY_BYTES, PackedKey
from kvframework.storage.l1.allocator import ALIGNMENT
from kvframework.storage.l1.journal.form import (
    CHECKSUM_AT,
    COMMITTED,
    CONTENT_AT,
    FREE,
    HEAD,
    HEADS_AT,
    IDENTITY_AT,
    IDENTITY_BYTES,
    LENGTH_AT,
    MAGIC,
    OFFSET_AT,
    PREFIX,
    RECORDS_AT,
    RESERVED,
    SCHEMA,
    SLOT,
    SLOT_BYTES,
    SLOT_TAIL,
    SLOT_WORDS,
    SLOTS_AT,
    START_BYTES,
    STARTS_AT,
    USE_AT,
    Identity,
    Start,
    namespace_checksum,
    read_blob,
)
from kvframework.storage.namespaces import MAX_NAMESPACES, RECORD_BYTES

# Seconds of a monotonic clock: a million years.
_LATEST = 3e13
# Slots that are read together: what is made of them on the way stays in the processor's caches.
_AT_ONCE = 1024
# What the checksum of a slot is of, and the key within it.
_BODY = struct.Struct(f"<8x{SLOT.size}s{SLOT_TAIL.size}x")
_KEY = slice(16, 16 + PACKED_KEY_BYTES)
_IS_COMMITTED = bytes(kind == COMMITTED for kind in range(256))


class Cold(Exception):
    """Why nothing of what a keeper holds can be used: `reason` is one of `COLD_REASONS` of the wire."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class FoundObject(NamedTuple):
    """A readable object. `state` is higher for what was reserved later; `checksum` is that of its bytes, 0 if it is not
    known."""

    used: float
    state: int
    slot: int
    key: PackedKey
    offset: int
    length: int
    tenant: int
    checksum: int


_used, _state, _key = itemgetter(0), itemgetter(1), itemgetter(3)
_range = itemgetter(4, 5)


class FoundReservation(NamedTuple):
    """A range that `writer` may still fill."""

    slot: int
    offset: int
    length: int
    writer: int
    tenant: int


class FoundSlots(NamedTuple):
    """`objects` are in the order of their uses, the oldest first, and those of one use from the end of the prompt;
    `free` are the other slots, `serial` is the highest one; `gaps` are the free ranges, (offset, length), in the order
    of the arena up to `end`, where the last other range ends."""

    objects: list[FoundObject]
    reservations: list[FoundReservation]
    free: list[int]
    serial: int
    gaps: list[tuple[int, int]]
    end: int


class Found(NamedTuple):
    """All that a journal holds. `namespaces` have their index, the encoded record, and whether it came from L2."""

    start: Start
    slots: FoundSlots
    namespaces: list[tuple[bytes, int, bytes, bool]]


def read_identity(journal: memoryview) -> Identity:
    """Return the journal's identity. Raises `Cold`."""
    size = Cold("damaged", f"a journal of {journal.nbytes} bytes")
    if journal.nbytes < PREFIX.size:
        raise size
    magic, schema = PREFIX.unpack_from(journal)
    if magic != MAGIC:
        raise Cold("no_journal", "it has ended, or is none")
    if schema != SCHEMA:
        raise Cold("other_release", f"a journal of schema {schema}, this release reads {SCHEMA}")
    if journal.nbytes < SLOTS_AT or (journal.nbytes - SLOTS_AT) % SLOT_BYTES:
        raise size
    identity = read_blob(journal[IDENTITY_AT : IDENTITY_AT + IDENTITY_BYTES], Identity)
    if identity is None:
        raise Cold("damaged", "the journal's identity")
    return identity


def read_start(journal: memoryview) -> Start:
    """Return the latest start that was written whole. Raises `Cold`."""
    places = (journal[at : at + START_BYTES] for at in (STARTS_AT, STARTS_AT + START_BYTES))
    starts = [start for place in places if (start := read_blob(place, Start)) is not None]
    if not starts:
        raise Cold("damaged", "the journal's record of starts")
    return max(starts, key=lambda start: start.serial)


def read(journal: memoryview, capacity: int) -> Found:
    """Return what the journal holds, of an arena of `capacity` bytes. Raises `Cold`."""
    return Found(read_start(journal), read_slots(journal[SLOTS_AT:], capacity), list(_namespaces(journal)))


def read_slots(region: memoryview, capacity: int) -> FoundSlots:
    """Return what the slots hold, which are `region`. Raises `Cold`."""
    found = FoundSlots([], [], [], 0, [], 0)
    serial = 0
    for first in range(0, region.nbytes // SLOT_BYTES, _AT_ONCE):
        part = region[first * SLOT_BYTES : (first + _AT_ONCE) * SLOT_BYTES]
        serial = max(serial, _read_part(part, first, found))
    objects, reservations = found.objects, found.reservations
    objects.sort(key=_state, reverse=True)
    objects.sort(key=_used)
    found.free.reverse()
    ranges = [*map(_range, objects), *((each.offset, each.length) for each in reservations)]
    gaps, end = _gaps(ranges, capacity)
    if len(set(map(_key, objects))) != len(objects):
        raise Cold("damaged", "two objects of one name")
    return found._replace(serial=serial, gaps=gaps, end=end)


def _read_part(part: memoryview, first: int, found: FoundSlots) -> int:
    """Add what some slots hold, of which the first has the number `first`; return the highest serial. Raises `Cold`."""
    # By columns, each in one call into C: a server that starts again reads all of it before its first answer.
    words, times = part.cast("Q"), part.cast("d")
    states = words[::SLOT_WORDS].tolist()
    kinds = bytes(part[::SLOT_BYTES])
    bodies = list(chain.from_iterable(_BODY.iter_unpack(part)))
    _check(first, states, kinds, bodies, words[CHECKSUM_AT // 8 :: SLOT_WORDS].tolist())
    committed = kinds.translate(_IS_COMMITTED)

    def column(values: memoryview[Any], at: int) -> Iterator[Any]:
        return compress(values[at // 8 :: SLOT_WORDS].tolist(), committed)

    slots = range(first, first + len(states))
    own = list(compress(states, committed))
    fields = zip(
        [used if 0.0 <= used < _LATEST else 0.0 for used in column(times, USE_AT)],
        own,
        compress(slots, committed),
        [body[_KEY] for body in compress(bodies, committed)],
        column(words, OFFSET_AT),
        column(words, LENGTH_AT),
        [state >> 8 & 0xFFFF for state in own],
        column(words, CONTENT_AT),
        strict=True,
    )
    # As FoundObject(...) does, in half the time.
    found.objects.extend(map(tuple.__new__, repeat(FoundObject), fields))
    at = kinds.find(RESERVED)
    while at >= 0:
        offset, length, _, writer = SLOT.unpack_from(part, at * SLOT_BYTES + 8)
        found.reservations.append(FoundReservation(first + at, offset, length, writer, states[at] >> 8 & 0xFFFF))
        at = kinds.find(RESERVED, at + 1)
    found.free.extend([slot for slot, state in zip(slots, states, strict=True) if state == FREE])
    return max(states) >> 24


def _check(first: int, states: list[int], kinds: bytes, bodies: list[bytes], checksums: list[int]) -> None:
    """Raise `Cold` unless each slot is free, or has a known state and its checksum."""
    taken = [at for at, state in enumerate(states) if state != FREE]
    seeds = [states[at] >> 8 for at in taken]
    made = map(xxhash.xxh3_64_intdigest, compress(bodies, states), seeds)
    good = list(map(eq, made, compress(checksums, states)))
    if not all(good):
        raise Cold("damaged", f"slot {first + taken[good.index(False)]} of the journal")
    if not {RESERVED, COMMITTED}.issuperset(compress(kinds, states)):
        at = next(at for at in taken if kinds[at] not in (RESERVED, COMMITTED))
        raise Cold("damaged", f"the state of slot {first + at} of the journal")


def _namespaces(journal: memoryview) -> Iterator[tuple[bytes, int, bytes, bool]]:
    for index in range(MAX_NAMESPACES):
        namespace, learned, checksum = HEAD.unpack_from(journal, HEADS_AT + index * HEAD.size)
        if not checksum:
            continue
        at = RECORDS_AT + index * RECORD_BYTES
        record = bytes(journal[at : at + RECORD_BYTES])
        if namespace_checksum(namespace, learned, record) == checksum:
            yield namespace, index, record, bool(learned)


def _gaps(ranges: list[tuple[int, int]], capacity: int) -> tuple[list[tuple[int, int]], int]:
    """Return what lies between ranges, (offset, length), in the order of the arena, and their end. Raises `Cold` unless
    each lies in the arena and none overlaps another."""
    ranges.sort()
    gaps = []
    end = 0
    for offset, length in ranges:
        if offset != end:
            if offset < end or offset % ALIGNMENT:
                raise Cold("damaged", f"the range at byte {offset} of the arena")
            gaps.append((end, offset - end))
        if length <= 0:
            raise Cold("damaged", f"the range at byte {offset} of the arena")
        end = offset + -(-length // ALIGNMENT) * ALIGNMENT
    if end > capacity:
        raise Cold("damaged", f"a range that ends at byte {end} of {capacity}")
    return gaps, end
