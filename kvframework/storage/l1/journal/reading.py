"""What a journal says that L1 holds. Pure, over the bytes of the journal; whatever is in doubt makes all of it
worthless."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from kvframework.api.keys import PackedKey
from kvframework.storage.l1.allocator import ALIGNMENT, rounded
from kvframework.storage.l1.journal.form import (
    COMMITTED,
    FREE,
    HEAD,
    HEADS_AT,
    IDENTITY_AT,
    IDENTITY_BYTES,
    MAGIC,
    PREFIX,
    RECORDS_AT,
    RESERVED,
    SCHEMA,
    SLOT,
    SLOT_BYTES,
    SLOTS_AT,
    START_BYTES,
    STARTS_AT,
    WHOLE_SLOT,
    Identity,
    Start,
    namespace_checksum,
    read_blob,
)
from kvframework.storage.namespaces import MAX_NAMESPACES, RECORD_BYTES

# Seconds of a monotonic clock: a million years.
_LATEST = 3e13


class Cold(Exception):
    """Why nothing of what a keeper holds can be used: `reason` is one of `COLD_REASONS` of the wire."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class FoundObject(NamedTuple):
    """A readable object. `order` is lower for what was reserved later; `checksum` is that of its bytes, 0 if it is not
    known."""

    used: float
    order: int
    slot: int
    key: PackedKey
    offset: int
    length: int
    tenant: int
    checksum: int


class FoundReservation(NamedTuple):
    """A range that `writer` may still fill."""

    slot: int
    offset: int
    length: int
    writer: int
    tenant: int


class FoundSlots(NamedTuple):
    """`objects` are in the order of their uses, the oldest first, and those of one use from the end of the prompt;
    `free` are the other slots, `serial` is the highest one; `taken` are all ranges, (offset, rounded length), in the
    order of the arena."""

    objects: list[FoundObject]
    reservations: list[FoundReservation]
    free: list[int]
    serial: int
    taken: list[tuple[int, int]]


class Found(NamedTuple):
    """All that a journal holds. `namespaces` have their index, the encoded record, and whether it came from L2."""

    start: Start
    slots: FoundSlots
    namespaces: list[tuple[bytes, int, bytes, bool]]


def read_identity(journal: memoryview) -> Identity:
    """Return the journal's identity. Raises `Cold`."""
    if journal.nbytes < SLOTS_AT or (journal.nbytes - SLOTS_AT) % SLOT_BYTES:
        raise Cold("damaged", f"a journal of {journal.nbytes} bytes")
    magic, schema = PREFIX.unpack_from(journal)
    if magic != MAGIC:
        raise Cold("no_journal", "it has ended, or is none")
    if schema != SCHEMA:
        raise Cold("other_release", f"a journal of schema {schema}, this release reads {SCHEMA}")
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
    objects: list[FoundObject] = []
    reservations: list[FoundReservation] = []
    free: list[int] = []
    last = 0
    checksum_of, body_bytes, made = xxhash.xxh3_64_intdigest, SLOT.size, tuple.__new__
    for slot, fields in enumerate(WHOLE_SLOT.iter_unpack(region)):
        state, offset, length, key, writer, used, checksum, content = fields
        if state == FREE:
            free.append(slot)
            continue
        kind, tenant, serial = state & 0xFF, state >> 8 & 0xFFFF, state >> 24
        at = slot * SLOT_BYTES + 8
        if checksum_of(region[at : at + body_bytes], serial << 16 | tenant) != checksum:
            raise Cold("damaged", f"slot {slot} of the journal")
        if serial > last:
            last = serial
        if kind == COMMITTED:
            when = used if 0.0 <= used < _LATEST else 0.0
            # As FoundObject(...) does, in half the time.
            objects.append(made(FoundObject, (when, -serial, slot, key, offset, length, tenant, content)))
        elif kind == RESERVED:
            reservations.append(FoundReservation(slot, offset, length, writer, tenant))
        else:
            raise Cold("damaged", f"the state of slot {slot} of the journal")
    taken = _ranges(objects, reservations, capacity)
    objects.sort()
    free.reverse()
    return FoundSlots(objects, reservations, free, last, taken)


def _namespaces(journal: memoryview) -> Iterator[tuple[bytes, int, bytes, bool]]:
    for index in range(MAX_NAMESPACES):
        namespace, learned, checksum = HEAD.unpack_from(journal, HEADS_AT + index * HEAD.size)
        if not checksum:
            continue
        at = RECORDS_AT + index * RECORD_BYTES
        record = bytes(journal[at : at + RECORD_BYTES])
        if namespace_checksum(namespace, learned, record) == checksum:
            yield namespace, index, record, bool(learned)


def _ranges(objects: list[FoundObject], reservations: list[FoundReservation], capacity: int) -> list[tuple[int, int]]:
    """Return all ranges. Raises `Cold` unless each lies in the arena, none overlaps another, and no name is there
    twice."""
    ranges = [(offset, length) for _, _, _, _, offset, length, _, _ in objects]
    ranges += [(offset, length) for _, offset, length, _, _ in reservations]
    ranges.sort()
    taken = []
    end = 0
    for offset, length in ranges:
        if offset < end or offset % ALIGNMENT or length <= 0:
            raise Cold("damaged", f"the range at byte {offset} of the arena")
        nbytes = rounded(length)
        taken.append((offset, nbytes))
        end = offset + nbytes
    if end > capacity:
        raise Cold("damaged", f"a range that ends at byte {end} of {capacity}")
    if len({key for _, _, _, key, _, _, _, _ in objects}) != len(objects):
        raise Cold("damaged", "two objects of one name")
    return taken
