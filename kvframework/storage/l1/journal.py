"""The journal of L1: each reservation, commit and removal, written when it happens, for the next server. One writer.

Little-endian, in a separate file beside the arena:

| bytes | what | |---|---| | 0 to 12 | magic, schema u32: the same in every release | | 16 to 2048 | `Identity` | | 2048
to 9216, 9216 to 16384 | `Start`, twice: the later serial counts, so that an interrupted write loses nothing | | from
`HEADS_AT` | a head for each of `MAX_NAMESPACES` records: namespace 16, 1 if from L2 u64, XXH3-64 u64 of all | | from
`RECORDS_AT` | these records of namespaces, of `RECORD_BYTES` each | | from `SLOTS_AT` | slots of 128 bytes, one an
object or reservation |

A blob is length u32, XXH3-64 u64, msgpack. A slot is: state u64; offset, length u64, packed key 72, writer u64; last
use f64 (seconds, of the machine's monotonic clock); XXH3-64 u64 of offset to writer; checksum of the object u64, 0 for
none. The state is 0 for a free slot, else kind 8 bits, tenant 16 bits, serial 40 bits; serial and tenant seed the
checksum. A slot is filled while its state is 0, then its state is written, one aligned word. So whatever instruction a
process is killed at, a slot holds either nothing or all of one object."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

import msgspec
import xxhash

from kvframework.api.keys import NAMESPACE_BYTES, SALT_BYTES, PackedKey
from kvframework.storage.l1.entries import ALIGNMENT, StoredObject, rounded
from kvframework.storage.namespaces import MAX_NAMESPACES, RECORD_BYTES

log = logging.getLogger(__name__)

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


def pack_blob(value: msgspec.Struct, room: int) -> bytes:
    """Return the bytes of a blob. Raises `ValueError` if there is no room for it."""
    packed = msgspec.msgpack.encode(value)
    if 12 + len(packed) > room:
        raise ValueError(f"the text has {len(packed)} bytes, at most {room - 12} fit")
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


# Reading a journal: any doubt makes the whole journal unusable.

# Seconds of a monotonic clock: a million years.
_LATEST = 3e13
_WHOLE = struct.Struct(f"<Q{SLOT.size}sdQQ")
_KIND = 0xFF
_ROW_BYTES = NAMESPACE_BYTES + SALT_BYTES


class Cold(Exception):
    """Why nothing of what a keeper holds can be used: `reason` is one of `COLD_REASONS` of `kvframework.status`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class FoundObject(NamedTuple):
    """A readable object. `state` is higher for later reservations; `checksum` is that of its bytes, 0 if not known."""

    used: float
    state: int
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
    check_schema(journal)
    if journal.nbytes < SLOTS_AT or (journal.nbytes - SLOTS_AT) % SLOT_BYTES:
        raise Cold("damaged", f"the journal has {journal.nbytes} bytes")
    identity = read_blob(journal[IDENTITY_AT : IDENTITY_AT + IDENTITY_BYTES], Identity)
    if identity is None:
        raise Cold("damaged", "the journal's identity is damaged")
    return identity


def check_schema(journal: bytes | memoryview) -> None:
    """Raise `Cold` unless this release reads a journal that begins with these bytes."""
    if len(journal) < PREFIX.size:
        raise Cold("damaged", f"the journal has {len(journal)} bytes")
    magic, schema = PREFIX.unpack_from(journal)
    if magic != MAGIC:
        raise Cold("no_journal", "the kept memory has no journal, or a closed one")
    if schema != SCHEMA:
        raise Cold("other_release", f"the journal has schema {schema}, expected {SCHEMA}")


def read_start(journal: memoryview) -> Start:
    """Return the latest start that was written whole. Raises `Cold`."""
    places = (journal[at : at + START_BYTES] for at in (STARTS_AT, STARTS_AT + START_BYTES))
    starts = [start for place in places if (start := read_blob(place, Start)) is not None]
    if not starts:
        raise Cold("damaged", "the journal's record of starts is damaged")
    return max(starts, key=lambda start: start.serial)


def read(journal: memoryview, capacity: int) -> Found:
    """Return what the journal holds, of an arena of `capacity` bytes. Raises `Cold`."""
    return Found(read_start(journal), read_slots(journal[SLOTS_AT:], capacity), list(_namespaces(journal)))


def read_slots(region: memoryview, capacity: int) -> FoundSlots:
    """Return what the slots hold, which are `region`. Raises `Cold`."""
    objects, reservations, free = list[FoundObject](), list[FoundReservation](), list[int]()
    latest, digest = 0, xxhash.xxh3_64_intdigest
    # A server that starts again reads all of it before its first answer: 2 us a slot.
    for slot, (state, body, used, checksum, content) in enumerate(_WHOLE.iter_unpack(region)):
        if state == FREE:
            free.append(slot)
            continue
        kind, tenant = state & _KIND, state >> 8 & 0xFFFF
        if digest(body, state >> 8) != checksum:
            raise Cold("damaged", f"slot {slot} of the journal is damaged")
        if state > latest:
            latest = state
        offset, length, key, writer = SLOT.unpack(body)
        if kind == COMMITTED:
            used = used if 0.0 <= used < _LATEST else 0.0
            objects.append(FoundObject(used, state, slot, key, offset, length, tenant, content))
        elif kind == RESERVED:
            reservations.append(FoundReservation(slot, offset, length, writer, tenant))
        else:
            raise Cold("damaged", f"the state of slot {slot} of the journal is unknown")
    objects.sort(key=attrgetter("state"), reverse=True)
    objects.sort(key=attrgetter("used"))
    free.reverse()
    ranges = [(each.offset, each.length) for each in objects]
    gaps, end = _gaps([*ranges, *((each.offset, each.length) for each in reservations)], capacity)
    if len({each.key for each in objects}) != len(objects):
        raise Cold("damaged", "two objects have the same name")
    return FoundSlots(objects, reservations, free, latest >> 24, gaps, end)


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
        if offset < end or offset % ALIGNMENT or length <= 0:
            raise Cold("damaged", f"the range at byte {offset} of the arena is wrong")
        if offset > end:
            gaps.append((end, offset - end))
        end = offset + rounded(length)
    if end > capacity:
        raise Cold("damaged", f"a range ends at byte {end} of an arena of {capacity} bytes")
    return gaps, end


# Who may still write into the arena, by locks of the kernel on its file, see fcntl(2), "Open file description locks",
# and flock(2). A lock lives as long as any descriptor or mapping of its open file description. The server and the
# processes that it starts share one description, with an exclusive flock: where another server gets that lock, all of
# them have ended. Each client session gets a separate description with a read lock on one byte, `writer`: while that
# byte is locked, the client may still write what it reserved. No process id is involved, so containers do not matter.

# type, whence, start, length, pid; the pad is that of the C structure.
_LOCK = struct.Struct("hhqqi4x")
_SESSION_BITS = 32


def own_description(fd: int) -> int:
    """Return a descriptor, the caller's, of a separate file description. Raises `OSError`, also without /proc."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def lock_for_server(fd: int) -> bool:
    """Take the server's lock, for this description; False while another server or one of its processes lives."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def writer_of(generation: int, session: int) -> int:
    """Return the number of a session as a writer, unique among the servers that had this arena."""
    return generation << _SESSION_BITS | session


def description_for(fd: int, writer: int) -> int:
    """Return the caller's descriptor of the arena for a client: while that is open, `may_write`. Raises `OSError`."""
    own = own_description(fd)
    try:
        _lock(own, fcntl.F_OFD_SETLK, fcntl.F_RDLCK, writer)
    except BaseException:
        os.close(own)
        raise
    return own


def may_write(fd: int, writer: int) -> bool:
    """Whether a client with this number may still write. `fd` is of another description. Raises `OSError`."""
    kind, *_ = _LOCK.unpack(_lock(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, writer))
    return bool(kind != fcntl.F_UNLCK)


def _lock(fd: int, command: int, kind: int, byte: int) -> bytes:
    return fcntl.fcntl(fd, command, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))


# Slots by which the file grows at least.
GROW_SLOTS = 8192
NO_SLOT = -1
# Uses of objects that one `write_uses` writes, at most: half a millisecond.
USES_AT_ONCE = 8192

_COMMIT = RESERVED ^ COMMITTED


class Journal:
    """The writer. Not thread-safe: the storage lock serialises its calls, those for namespaces have the lock of the
    records. A reservation costs 1.5 us an object, a commit or a removal 0.1 us.

    Owns `fd`; `memory` is its bytes, read and written by this process alone. When the machine has no
    memory for more slots, the journal ends: it is worth nothing to a next server then, and the calls do nothing."""

    def __init__(self, fd: int) -> None:
        """Map the file, whatever it holds. Raises `OSError` and `ValueError`; `fd` is closed then."""
        self.fd = fd
        self.start = Start(0, 0)
        self.ended = False
        self._free: list[int] = []
        self._serial = 0
        # The journal's number of each tenant.
        self._tenant_numbers = [0]
        self._namespaces: dict[bytes, int] = {}
        self._free_namespaces = list(range(MAX_NAMESPACES - 1, -1, -1))
        self._uses: list[Sequence[StoredObject]] = []
        try:
            self._map()
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def create(cls, identity: Identity, tenants: Sequence[str] = ()) -> Journal:
        """Make a journal in a new memfd. Raises `OSError`, and `ValueError` for too many tenants."""
        fd = os.memfd_create("kvframework-journal", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, RECORDS_AT)
            os.ftruncate(fd, SLOTS_AT)
        except BaseException:
            os.close(fd)
            raise
        journal = cls(fd)
        try:
            journal._put(IDENTITY_AT, pack_blob(identity, IDENTITY_BYTES))
            journal.begin(tenants)
            journal._put(0, PREFIX.pack(MAGIC, SCHEMA))
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def generation(self) -> int:
        return self.start.generation

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return os.fstat(self.fd).st_blocks * 512

    def begin(self, tenants: Sequence[str]) -> None:
        """Record the start of a server with these tenants, which counts as failed until `served`. Raises `ValueError`
        if there is no room for the names of all tenants since its creation."""
        names = (*self.start.tenants, *(name for name in tenants if name not in self.start.tenants))
        self._tenant_numbers = [0, *(names.index(name) + 1 for name in tenants)]
        self._write_start(Start(self.start.serial + 1, self.start.generation + 1, self.start.failed + 1, names))

    def served(self) -> None:
        """Record that the start has succeeded."""
        self._write_start(msgspec.structs.replace(self.start, serial=self.start.serial + 1, failed=0))

    def holds(self, found: Found) -> None:
        """Take over what has been read from this journal."""
        self._free = found.slots.free
        self._serial = found.slots.serial
        self._namespaces = {namespace: index for namespace, index, *_ in found.namespaces}
        taken = set(self._namespaces.values())
        self._free_namespaces = [index for index in range(MAX_NAMESPACES - 1, -1, -1) if index not in taken]

    def close(self) -> None:
        """Close the descriptor. The mapping ends with the object."""
        os.close(self.fd)

    # objects

    def reserve(self, items: Sequence[tuple[PackedKey, int, int]], *, owner: int, tenant: int) -> list[int]:
        """Record ranges, (key, offset, length), that session `owner` may write, 0: the server; return their slots."""
        if self.ended or (len(self._free) < len(items) and not self._grow(len(items))):
            return [NO_SLOT] * len(items)
        memory, words, free, serial = self.memory, self._words, self._free, self._serial
        tenant = self._tenant_numbers[tenant]
        slots = []
        writer = writer_of(self.start.generation, owner) if owner else 0
        for key, offset, nbytes in items:
            slot = free.pop()
            serial = (serial + 1) % MAX_SERIAL
            body = SLOT.pack(offset, nbytes, key, writer)
            at = SLOTS_AT + slot * SLOT_BYTES + 8
            memory[at : at + SLOT.size] = body
            SLOT_TAIL.pack_into(memory, at + SLOT.size, 0.0, xxhash.xxh3_64_intdigest(body, serial << 16 | tenant), 0)
            words[_FIRST_WORD + slot * SLOT_WORDS] = serial << 24 | tenant << 8 | RESERVED
            slots.append(slot)
        self._serial = serial
        return slots

    def commit(self, slots: Sequence[int], now: float) -> None:
        """Record that the ranges of reserved slots hold their objects."""
        if self.ended:
            return
        words, uses = self._words, self._use_times
        for slot in slots:
            if slot >= 0:
                at = _FIRST_WORD + slot * SLOT_WORDS
                uses[at + USE_AT // 8] = now
                words[at] ^= _COMMIT

    def release(self, slots: Iterable[int]) -> None:
        """Record that the ranges of slots are free."""
        if self.ended:
            return
        words, free = self._words, self._free
        for slot in slots:
            if slot >= 0:
                words[_FIRST_WORD + slot * SLOT_WORDS] = FREE
                free.append(slot)

    def sealed(self, slot: int, checksum: int) -> None:
        """Record the checksum of an object, see `namespaces.object_checksum`."""
        if slot >= 0 and not self.ended:
            self._words[_FIRST_WORD + slot * SLOT_WORDS + CONTENT_AT // 8] = checksum

    def used(self, objects: Sequence[StoredObject]) -> None:
        """Remember that objects were used; `write_uses` writes their times."""
        self._uses.append(objects)

    def write_uses(self) -> None:
        """Write the times of the latest uses, of `USES_AT_ONCE` objects at most."""
        left, times = USES_AT_ONCE, self._use_times
        while self._uses and left > 0 and not self.ended:
            objects = self._uses.pop()[:left]
            left -= len(objects)
            for stored in objects:
                if stored.slot >= 0:
                    times[_FIRST_WORD + stored.slot * SLOT_WORDS + USE_AT // 8] = stored.used
        self._uses.clear()

    # namespaces

    def record(self, namespace: bytes, value: bytes, *, learned: bool) -> None:
        """Record the facts of a namespace, of `RECORD_BYTES`, in place of those of earlier."""
        if self.ended:
            return
        index = self._namespaces.get(namespace)
        if index is None:
            if not self._free_namespaces:
                return
            index = self._namespaces[namespace] = self._free_namespaces.pop()
        head_at, at = HEADS_AT + index * HEAD.size, RECORDS_AT + index * RECORD_BYTES
        head = HEAD.pack(namespace, learned, namespace_checksum(namespace, learned, value))
        if self.memory[head_at : head_at + HEAD.size] == head:
            return  # as it was found
        try:
            os.posix_fallocate(self.fd, at, RECORD_BYTES)
        except OSError as error:
            self._end(error)
            return
        # The old record counts no more while the new one is written.
        self._put(head_at, bytes(HEAD.size))
        self._put(at, value)
        self._put(head_at, head)

    def forget(self, namespace: bytes) -> None:
        index = self._namespaces.pop(namespace, None)
        if index is not None and not self.ended:
            self._put(HEADS_AT + index * HEAD.size, bytes(HEAD.size))
            self._free_namespaces.append(index)

    def _write_start(self, start: Start) -> None:
        self._put(STARTS_AT + start.serial % 2 * START_BYTES, pack_blob(start, START_BYTES))
        self.start = start

    def _put(self, at: int, data: bytes) -> None:
        self.memory[at : at + len(data)] = data

    def _map(self) -> None:
        size = os.fstat(self.fd).st_size
        self._slots = (size - SLOTS_AT) // SLOT_BYTES
        self.memory = memoryview(mmap.mmap(self.fd, size))
        whole = self.memory[: size - size % 8]
        self._words = whole.cast("Q")
        self._use_times = whole.cast("d")

    def _grow(self, more: int) -> bool:
        first = self._slots
        slots = max(GROW_SLOTS, more, first // 4)
        try:
            # Allocated, so that no write to it can be a SIGBUS.
            os.posix_fallocate(self.fd, SLOTS_AT + first * SLOT_BYTES, slots * SLOT_BYTES)
            self._map()
        except (OSError, ValueError) as error:
            self._end(error)
            return False
        self._free.extend(range(first + slots - 1, first - 1, -1))
        return True

    def _end(self, error: Exception) -> None:
        self.ended = True
        self._put(0, bytes(PREFIX.size))
        log.error("the journal of L1 failed, so the next server starts with an empty L1: %s", error)


_FIRST_WORD = SLOTS_AT // 8
