"""The format of the journal: a header, a table of namespaces, then one slot an object or reservation. Pure.

Little-endian, in a file of its own beside the arena:

| bytes | what |
|---|---|
| 0 to 12 | magic, schema u32: the same in every release |
| 16 to 2048 | `Identity` |
| 2048 to 9216, 9216 to 16384 | `Start`, twice: the later serial counts, so that an interrupted write loses nothing |
| from `HEADS_AT` | a head for each of `MAX_NAMESPACES` records: namespace 16, 1 if from L2 u64, XXH3-64 u64 of all |
| from `RECORDS_AT` | these records of namespaces, of `RECORD_BYTES` each |
| from `SLOTS_AT` | slots of 128 bytes |

A blob is length u32, XXH3-64 u64, msgpack. A slot is: state u64; offset, length u64, packed key 72, writer u64; last
use f64 (seconds, of the machine's monotonic clock); XXH3-64 u64 of offset to writer; checksum of the object u64, 0 for
none. The state is 0 for a free slot, else kind 8 bits, tenant 16 bits, serial 40 bits; serial and tenant seed the
checksum. A slot is filled while its state is 0, then its state is written, one aligned word. So whatever instruction a
process is killed at, a slot holds either nothing or all of one object.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from itertools import chain, compress, repeat
from operator import eq, itemgetter
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash

from kvframework.api.keys import NAMESPACE_BYTES, PACKED_KEY_BYTES, SALT_BYTES, PackedKey
from kvframework.storage.l1.entries import ALIGNMENT
from kvframework.storage.namespaces import MAX_NAMESPACES, RECORD_BYTES

MAGIC = b"KVFJRNL\0"
SCHEMA = 2
PREFIX = struct.Struct("<8sI")
IDENTITY_AT, IDENTITY_BYTES = 16, 2032
# Room for the names of three times as many tenants as one configuration may have, of the greatest length.
STARTS_AT, START_BYTES = 2048, 7168

HEAD = struct.Struct("<16sQQ")
HEADS_AT = 16384
RECORDS_AT = HEADS_AT + MAX_NAMESPACES * HEAD.size
SLOTS_AT = RECORDS_AT + MAX_NAMESPACES * RECORD_BYTES

SLOT_BYTES = 128
SLOT_WORDS = SLOT_BYTES // 8
# offset, length, key, writer; last use, checksum of these, checksum of the object.
SLOT = struct.Struct("<QQ72sQ")
SLOT_TAIL = struct.Struct("<dQQ")
OFFSET_AT, LENGTH_AT = 8, 16
USE_AT = 8 + SLOT.size
CHECKSUM_AT, CONTENT_AT = USE_AT + 8, USE_AT + 16

FREE = 0
# Eight bits apart.
RESERVED = 0x5A
COMMITTED = 0xA5
MAX_SERIAL = 1 << 40
FIRST_GENERATION = 1

T = TypeVar("T")


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """What has to be the same for a journal's objects to mean the same. `memory` is the plugin's name, `options` its
    options as JSON; `arena` is (device, inode) of the arena's file, `machine` the id of the machine's boot."""

    chunk_size: int
    hasher: str
    memory: str
    options: str
    arena: tuple[int, int]
    machine: str
    slot: str = f"{SLOT_BYTES} bytes, keys of 72"

    def of(self, arena_fd: int) -> Identity:
        """Return the identity of a journal of this arena."""
        status = os.fstat(arena_fd)
        return msgspec.structs.replace(self, arena=(status.st_dev, status.st_ino))


class Start(msgspec.Struct, frozen=True, array_like=True):
    """The latest start of a server with this journal. `generation` counts the starts, `failed` those in a row that have
    not served; `tenants` are the names of the tenants by number, from 1."""

    serial: int
    generation: int
    failed: int = 0
    tenants: tuple[str, ...] = ()


def state_word(kind: int, tenant: int, serial: int) -> int:
    return serial << 24 | tenant << 8 | kind


def pack_blob(value: msgspec.Struct, room: int) -> bytes:
    """Return the bytes of a blob. Raises `ValueError` if there is no room for it."""
    packed = msgspec.msgpack.encode(value)
    if 12 + len(packed) > room:
        raise ValueError(f"{len(packed)} bytes, at most {room - 12}")
    return struct.pack("<IQ", len(packed), xxhash.xxh3_64_intdigest(packed)) + packed


def read_blob(place: memoryview, kind: type[T]) -> T | None:
    """Return what a blob holds, None if it is damaged."""
    length, checksum = struct.unpack_from("<IQ", place)
    packed = bytes(place[12 : 12 + length])
    if len(packed) != length or xxhash.xxh3_64_intdigest(packed) != checksum:
        return None
    try:
        return msgspec.msgpack.decode(packed, type=kind)
    except msgspec.DecodeError:
        return None


def namespace_checksum(namespace: bytes, learned: int, record: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(namespace)
    digest.update(learned.to_bytes(8, "little"))
    digest.update(record)
    return digest.intdigest()


# What a journal says that L1 holds. Pure, over the bytes of the journal; whatever is in doubt makes all of it
# worthless.

# Seconds of a monotonic clock: a million years.
_LATEST = 3e13
# Slots that are read together: what is made of them on the way stays in the processor's caches.
_AT_ONCE = 1024
# What the checksum of a slot is of, and the key within it.
_BODY = struct.Struct(f"<8x{SLOT.size}s{SLOT_TAIL.size}x")
_KEY = slice(16, 16 + PACKED_KEY_BYTES)
_ROW_BYTES = NAMESPACE_BYTES + SALT_BYTES
_IS_COMMITTED = bytes(kind == COMMITTED for kind in range(256))


class Cold(Exception):
    """Why nothing of what a keeper holds can be used: `reason` is one of `COLD_REASONS` of `kvframework.status`."""

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

    def runs(self) -> Iterator[Sequence[FoundObject]]:
        """Yield neighbours of one namespace, salt and tenant together: mostly those of one request."""
        first, of = 0, (b"", -1)
        for index, (_, _, _, key, _, _, tenant, _) in enumerate(self.objects):
            if of != (owner := (key[:_ROW_BYTES], tenant)):
                if index:
                    yield self.objects[first:index]
                first, of = index, owner
        if self.objects:
            yield self.objects[first:]


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
