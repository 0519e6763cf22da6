"""The journal of a running server: each reservation, commit and removal of L1, written when it happens. One writer.

Not thread-safe: the storage lock serialises its calls, those for namespaces have the lock of the records. A
reservation costs 1.5 us an object, a commit or a removal 0.1 us.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
import xxhash

from kvframework.api.keys import PackedKey
from kvframework.storage.l1.journal_format import (
    COMMITTED,
    CONTENT_AT,
    FREE,
    HEAD,
    HEADS_AT,
    IDENTITY_AT,
    IDENTITY_BYTES,
    MAGIC,
    MAX_SERIAL,
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
    Found,
    Identity,
    Start,
    namespace_checksum,
    pack_blob,
    state_word,
)
from kvframework.storage.namespaces import MAX_NAMESPACES, RECORD_BYTES

log = logging.getLogger(__name__)

# Who may still write into the arena, by locks of the kernel on its file.
#
# A lock belongs to an open file description, which lives as long as any descriptor or mapping of it. The server and the
# processes that it starts share one description, with an exclusive flock: where another server gets that lock, all of
# them have ended. Each client session gets a description of its own with a read lock on one byte, `writer`: while that
# byte is locked, the client may still write what it reserved. No process id is involved, so containers do not matter.
#
# See fcntl(2), "Open file description locks", and flock(2).

# type, whence, start, length, pid; the pad is that of the C structure.
_LOCK = struct.Struct("hhqqi4x")
_SESSION_BITS = 32


def own_description(fd: int) -> int:
    """Return a descriptor, owned by the caller, of an open file description of its own. Raises `OSError`, also where
    there is no /proc."""
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
    """Return a descriptor of the arena for a client, owned by the caller: while it, or a mapping of it, exists,
    `may_write` is true. Raises `OSError`."""
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

_KIND = 0xFF
_COMMIT = RESERVED ^ COMMITTED


class Used(Protocol):
    """An object of L1: its slot, and when it was used last."""

    slot: int
    used: float


class Journal:
    """The writer. Owns `fd`; `memory` is its bytes, read and written by this process alone. When the machine has no
    memory for more slots, the journal ends: it is worth nothing to a next server then, and the calls do nothing."""

    def __init__(self, fd: int) -> None:
        """Map the file, whatever it holds. Raises `OSError` and `ValueError`; `fd` is closed then."""
        self.fd = fd
        self.start = Start(0, 0)
        self.ended = False
        self._free: list[int] = []
        self._serial = 0
        # By the number of a tenant here.
        self._tenant_numbers = [0]
        self._namespaces: dict[bytes, int] = {}
        self._free_namespaces = list(range(MAX_NAMESPACES - 1, -1, -1))
        self._uses: list[Sequence[Used]] = []
        try:
            self._map()
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def create(cls, identity: Identity, tenants: Sequence[str] = ()) -> Journal:
        """Make a new journal in a memfd of its own. Raises `OSError`, and `ValueError` for more tenants than a
        configuration has."""
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
        """Record ranges, (key, offset, length), into which the session `owner` may write, 0 for the server itself;
        return the slot of each."""
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
            words[_FIRST_WORD + slot * SLOT_WORDS] = state_word(RESERVED, tenant, serial)
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
        """Record the checksum of an object, see `envelope.object_checksum`."""
        if slot >= 0 and not self.ended:
            self._words[_FIRST_WORD + slot * SLOT_WORDS + CONTENT_AT // 8] = checksum

    def used(self, objects: Sequence[Used]) -> None:
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
        log.error("the journal of L1 ends, so the next server begins cold: %s", error)


_FIRST_WORD = SLOTS_AT // 8
