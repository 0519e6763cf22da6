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
from typing import TypeVar

import msgspec
import xxhash

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
