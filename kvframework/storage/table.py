"""L1 of a server: the arena, the table of its objects, and who hears of them: the tiers, the statistics, the records of
what comes and leaves. Called from the serving thread and from the storage threads."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvframework.api.eviction import EvictionPolicy, PackedKey, Use
from kvframework.api.keys import DIGEST_BYTES, Retain
from kvframework.api.memory import Memory
from kvframework.api.plugin import ByteSize
from kvframework.bounded_calls import call_within
from kvframework.config.schema import L1Keys
from kvframework.record_ring import NO_RECORDS, RecordRing
from kvframework.status import L1Counters, zeros
from kvframework.storage.l1 import journal as journals
from kvframework.storage.l1.entries import ALIGNMENT, StoredObject, rounded
from kvframework.storage.l1.eviction import SALT, Tenant
from kvframework.storage.l1.eviction_statistics import Cause, EvictionStatistics, Ghost
from kvframework.storage.l1.journal import Identity, Journal
from kvframework.storage.l1.leases import INTERNAL_OWNER, Pinned, PromptPart, Reservation
from kvframework.storage.l1.objects import ObjectTable, locked
from kvframework.storage.l2.tiers import Tiers
from kvframework.storage.namespaces import UNKNOWN_LAYOUT, NamespaceRecords, decode_record, object_checksum
from kvframework.storage.recovery import NOT_RECOVERED, Recovery

log = logging.getLogger(__name__)

T = TypeVar("T")

# A server that has lived for this long has not failed to start.
SERVED_S = 1.0
# Least time that the arena's plugin gets to close.
ARENA_END_S = 0.2
# Work on many objects holds the lock for this number at a time, a few milliseconds, with this pause in between.
AT_ONCE = 512
TURN_S = 0.001
# Objects that one tick evicts, a bound on the time it takes from the serving thread.
EVICT_AT_ONCE = 2048
# Objects dropped by one store that are remembered: a lookup misses its first chunk first, of some groups.
MOST_DROPPED = 32
# Objects that `Verification` pins at once, and until a damaged one that a reader has pinned is tried again.
VERIFY_AT_ONCE = 16
# Bytes that `erase` withholds from stores at a time, and writes in one step, which keeps the interpreter lock.
ERASE_AT_ONCE = 32 << 20
_ZEROS = bytes(1 << 20)
AGAIN_S = 0.1


class Table(ObjectTable):
    """`memory` and `recovery` are owned from here on and closed by `close`. `policy` orders the objects of no named
    tenant. `ghosts` is the number of keys that left L1 that are remembered. `records` are shared with the
    tiers' stores; `ring` gets the records of what comes into L1, and leaves it."""

    # Set before any other call.
    tiers: Tiers

    def __init__(
        self,
        memory: Memory,
        policy: EvictionPolicy,
        *,
        records: NamespaceRecords | None = None,
        high_watermark: float = 1.0,
        low_watermark: float = 0.9,
        ghosts: int = 0,
        tenants: Sequence[Tenant] = (),
        recovery: Recovery = NOT_RECOVERED,
        ring: RecordRing = NO_RECORDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(policy, tenants, journal=recovery.journal, clock=clock)
        self.counters = Counter(zeros(L1Counters))
        # Objects loaded ahead of their request and not used yet, with their bytes.
        self._ahead: dict[PackedKey, int] = {}
        # One without records is false.
        self.records = records = NamespaceRecords() if records is None else records
        self.ring = ring
        self._memory = memory
        self.arena_fd, self.capacity = memory.fd, int(memory.capacity)
        # For server-driven transports; valid until `close`.
        self.arena = memory.view()
        self._high, self._low = high_watermark, low_watermark
        # The last tick did not reach the low watermark.
        self._lowering = False
        self._statistics = EvictionStatistics(self.capacity, ghosts, records.model_of, clock)
        self.looked_up = self._statistics.looked_up
        # The seconds in which engines compute a token, as far as they say.
        self.compute_s: float | None = None
        self._serves_at = clock() + SERVED_S
        self._shared = False
        self._recovered = self._adopt(recovery)
        self.verification = Verification(self, recovery.checksums, records.layout_of)
        memory.start(self._on_ready)

    def arena_for(self, session: int) -> int:
        """Return a descriptor of the arena for a client's session, owned by the caller. A later server knows by it
        whether the client may still write, see `kvframework.storage.l1.journal`. Raises `OSError`."""
        generation = journals.FIRST_GENERATION if self._journal is None else self._journal.generation
        try:
            return journals.description_for(self.arena_fd, journals.writer_of(generation, session))
        except OSError:
            if self._journal is not None:
                raise
            self._shared = True  # the description of all: no other server can know who still writes
            return os.dup(self.arena_fd)

    @property
    def is_recoverable(self) -> bool:
        return self._journal is not None

    @property
    def began_empty(self) -> bool:
        """Whether L1 began without any object of an earlier server."""
        return not self._recovered["objects"]

    @locked
    def hand_over(self, identity: Identity, tenants: Sequence[str]) -> tuple[int, int]:
        """Return the descriptors of the arena and of the journal, borrowed; without a keeper the journal begins here,
        which takes some microseconds an object. Raises `OSError`, and `ValueError` for too many tenants."""
        if self._journal is None:
            if self._shared or not journals.lock_for_server(self.arena_fd):
                raise OSError(errno.EBUSY, "clients share this server's lock on the arena")
            journal = Journal.create(identity.of(self.arena_fd), tenants)
            self.keep_in(journal)
            self.records.keep_in(journal)
            return self.arena_fd, journal.fd
        return self.arena_fd, self._journal.fd

    @locked
    def count(self, **amounts: int) -> None:
        self.counters.update(amounts)

    @locked
    def configure_share(self, pin_share: float) -> None:
        """Change the share of L1 that one session may keep from eviction while others need room, see `PinShares`."""
        self.shares.configure(pin_share * self.capacity)

    def over_share(self, session: int) -> bool:
        return self.shares.payer(session) in self.shares.over

    @locked
    def pinned_bytes(self) -> dict[int, Pinned]:
        return self.shares.by_session()

    @locked
    def configure(self, keys: L1Keys) -> None:
        self._high, self._low = keys.high_watermark, keys.low_watermark

    def absent(self, key: PackedKey, most: int) -> tuple[Ghost | None, list[bytes]]:
        """Return why L1 lacks the object, as far as that is remembered; if it is not, the key prefixes, of the `most`
        latest ones, under which L1 has an object of the same chunk."""
        with self.lock:
            ghost = self._statistics.ghost(key)
            return ghost, [] if ghost else self._objects.prefixes_with(key[-DIGEST_BYTES:], most)

    # what the others hear

    def on_reserved(self, items: Sequence[tuple[PackedKey, int]], result: Reservation, used_before: int) -> None:
        if used_before <= self._high * self.capacity < self.used_bytes:
            # Reported at once, so that later victims can be written before their eviction.
            self.tiers.leaving(self.candidates(int(self._low * self.capacity)))
        self.counters["dropped"] += result.dropped
        if result.stopped_at is not None:
            cause = Cause.DROPPED_SHARE if result.over_share else Cause.DROPPED_FULL
            if result.refused:
                cause = Cause.REFUSED
            first = result.stopped_at
            dropped = [key for key, _ in items[first : first + MOST_DROPPED] if key not in self]
            self._statistics.lost(dropped, cause)

    def on_committed(self, objects: list[StoredObject], use: Use) -> None:
        keys = [stored.key for stored in objects]
        self._statistics.back(keys)
        if self.ring.wanted:
            self.ring.added(keys)
        if use == "load":
            self.counters["loaded"] += len(objects)
        else:
            self.counters["stored"] += len(objects)
            self.tiers.committed(keys)

    def on_used(self, objects: list[StoredObject]) -> None:
        if self._ahead:
            self.counters["ahead_used_bytes"] += sum([self._ahead.pop(stored.key, 0) for stored in objects])
        if self.tiers.watches_uses:
            self.tiers.used([stored.key for stored in objects])

    def on_promised(self, objects: list[StoredObject], retain: Retain) -> None:
        for writer in self.tiers.writers:
            writer.promised([stored.key for stored in objects], retain.tiers_s, retain.priority)

    def on_removed(self, stored: StoredObject, cause: Cause, by: PackedKey | None) -> None:
        if self._ahead:
            self.counters["ahead_wasted_bytes"] += self._ahead.pop(stored.key, 0)
        self._statistics.left(stored, cause, by)
        self.tiers.removed(stored.key)
        if self.ring.wanted:
            self.ring.removed(stored.key)

    def on_writers_ended(self) -> None:
        # A load that begins to wait now checks by itself.
        self.tiers.writers_ended(self.any_writing)

    def was_done(self, key: PackedKey) -> bool:
        ghost = self._statistics.ghost(key)
        return ghost is not None and ghost.cause is Cause.HINTED

    # time and ends

    @locked
    def tick(self) -> None:
        """Expire leases; above the high watermark, evict down to the low one, except for objects that a write policy
        must write before. Called about every 100 ms; each call is bounded, and the next ones continue."""
        self.expire()
        self.prices = self.compute_s, self.tiers.load_s()
        if self._journal is not None:
            self._tend(self._journal)
        self.on_writers_ended()
        if self.is_full:
            victims = self.candidates(int(self._low * self.capacity))
            kept = self.tiers.leaving(victims)
            going = [key for key in victims if key not in kept]
            self.drop(going[:EVICT_AT_ONCE], Cause.WATERMARK)
            self._lowering = len(going) > EVICT_AT_ONCE

    @property
    def is_full(self) -> bool:
        """Whether L1 is above its high watermark, or a tick has not reached the low one yet."""
        above = self._high < 1.0 and self.used_bytes > self._high * self.capacity
        return above or self._lowering

    def clear(self, wanted: Callable[[PackedKey], bool]) -> tuple[dict[PackedKey, int], int]:
        """Drop the wanted objects present at the call that are unused at their turn: (their sizes, number of those in
        use). Objects stored meanwhile stay, even under the name of a dropped one. Other callers take turns with it."""
        dropped: dict[PackedKey, int] = {}
        in_use = 0
        for part in self._in_turns([stored for stored in self.objects() if wanted(stored.key)]):
            gone, used = self.drop_unused(part)
            dropped.update((stored.key, stored.length) for stored in gone)
            in_use += used
        return dropped, in_use

    def held(self, wanted: Callable[[PackedKey], bool]) -> tuple[int, int]:
        """Return how many of the wanted objects are here, and how many a client or a load is writing."""
        here = sum(wanted(stored.key) for stored in self.objects())
        with self.lock:
            writing = list(self._writing)
        return here, sum(map(wanted, writing))

    def salts_of(self, tenant: int) -> set[bytes]:
        """Return the salts in keys of a tenant's objects, as far as they are remembered or in L1."""
        here = {stored.key[SALT] for stored in self.objects() if stored.tenant == tenant}
        with self.lock:
            return here | self.tenants.salts(tenant)

    def erase(self) -> tuple[int, int]:
        """Overwrite with zeros every byte of the arena that no object and no reservation has: what objects have left
        behind. Return (bytes of free ranges, bytes that stay, because they are reserved). Blocks for about 0.3 s a GiB;
        other callers take turns with it."""
        erased = start = 0
        while start < self.allocator.reached:
            with self.lock:
                taken = self.allocator.take(start, start + ERASE_AT_ONCE)
            try:
                for offset, length in taken:
                    self._zero(offset, length)
            finally:
                with self.lock:
                    for offset, length in taken:
                        self.allocator.free(offset, length)
            erased += sum(length for _, length in taken)
            start += ERASE_AT_ONCE
            time.sleep(TURN_S)
        # An object's last page may end with bytes of an earlier object.
        objects = self.objects()
        for part in self._in_turns([stored for stored in objects if stored.length % ALIGNMENT]):
            for stored in part:
                if self._objects.get(stored.key) is stored:
                    end = stored.offset + stored.length
                    self._zero(end, -end % ALIGNMENT)
        with self.lock:
            return erased, self.used_bytes - sum(rounded(stored.length) for stored in self._objects)

    def _zero(self, offset: int, length: int) -> None:
        for at in range(offset, offset + length, len(_ZEROS)):
            size = min(len(_ZEROS), offset + length - at)
            self.arena[at : at + size] = memoryview(_ZEROS)[:size]

    @locked
    def write_uses(self) -> None:
        """Record the latest uses for the next server, which is about to start."""
        if self._journal is not None:
            self._journal.write_uses()

    @locked
    def served(self) -> None:
        """Record for the next server that this one's start has not failed: it has been asked to end."""
        if self._journal is not None:
            self._journal.served()

    def close(self, deadline: float, *, process_ends: bool) -> None:
        """Free the arena. An unfinished copy of a transport keeps it mapped, since it may still write there. If the
        process ends right afterwards, the kernel frees memory that ends with it."""
        if process_ends:
            with contextlib.suppress(BufferError):  # a transport's, see `Memory.leave`
                self.arena.release()
            if call_within(max(deadline - time.monotonic(), ARENA_END_S), {"the arena": self._memory.leave}):
                log.error("the server ends before it could unmap the arena")
            return
        try:
            self.arena.release()
            self._memory.close()
        except BufferError:
            log.error("the arena stays mapped, because a transport still uses it after its last request")

    @locked
    def status(self) -> dict[str, object]:
        check = self.verification
        return {
            "capacity_bytes": self.capacity,
            "ready_bytes": self.allocator.limit,
            "used_bytes": self.used_bytes,
            "free_bytes": self.allocator.free_bytes,
            "largest_free_bytes": self.allocator.largest_free,
            "fragmentation": round(self.allocator.fragmentation, 4),
            "quarantined_bytes": self.quarantined_bytes,
            "objects": len(self),
            "pins": self.pins,
            "write_leases": self.write_leases,
            "pin_leases": self.pin_leases,
            "evictions": self.evictions,
            "recovered": {**self._recovered, "verified": check.verified, "damaged": check.damaged},
            "journal_bytes": self._journal.nbytes if self._journal is not None else 0,
            **self._statistics.status(),
            "counters": {
                **self.counters,
                "quarantined": self.quarantines,
                "lapsed": self.lapses,
                "over_share": self.shares.all_cuts,
            },
        }

    # for writers and loads, see `kvframework.storage.l2.sealed_tier.L1`

    def pin_present(self, keys: Sequence[PackedKey]) -> list[StoredObject]:
        """Pin each of `keys` that is in L1, without counting as an access for eviction."""
        return [stored for part in self._in_turns(keys) for stored in self.hold(part)]

    def release(self, objects: Sequence[StoredObject]) -> None:
        for part in self._in_turns(objects):
            self.let_go(part)

    def bytes_of(self, stored: StoredObject) -> memoryview:
        return self.arena[stored.offset : stored.offset + stored.length]

    def reserve_load(
        self, key: PackedKey, nbytes: int, prompt: PromptPart, client: int
    ) -> tuple[str, memoryview] | None:
        """Return a client's place to load an object into; None if it is present or being written, or without room."""
        result = self.reserve([(key, nbytes)], owner=INTERNAL_OWNER, payer=client, use="load", prompt=prompt)
        if result.lease is None:
            return None
        offset = result.placed[0][1]
        return result.lease.id, self.arena[offset : offset + nbytes]

    @locked
    def finish_load(self, lease_id: str, good: bool) -> list[StoredObject]:
        """Publish and pin a loaded object, or free its place: []."""
        if not good:
            self.abort(lease_id, owner=INTERNAL_OWNER)
            return []
        return self.hold([stored.key for stored in self.commit(lease_id, owner=INTERNAL_OWNER)])

    @locked
    def loaded_ahead(self, objects: Sequence[StoredObject]) -> None:
        """Count whether objects that were just loaded are used before they leave."""
        self._ahead.update((stored.key, stored.length) for stored in objects)

    @locked
    def drop_damaged(self, key: PackedKey) -> bool:
        """Drop an object whose bytes are not what they were; False while it is pinned."""
        return bool(self.drop([key], Cause.DAMAGED)) or key not in self

    @locked
    def damaged(self, key: PackedKey) -> None:
        self._statistics.lost([key], Cause.DAMAGED)

    # inside

    def _adopt(self, recovery: Recovery) -> dict[str, object]:
        """Take over what an earlier server held; return what `status` shows of it."""
        began = time.monotonic()
        journal, found = recovery.journal, recovery.found
        if journal is not None and found is not None:
            for namespace, _, value, learned in found.namespaces:
                record = decode_record(value)
                if record is not None:
                    self.records.add(namespace, record, learned=learned)
            names = self.tenants.names
            self.adopt(found, [names.index(name) if name in names else 0 for name in found.start.tenants])
            self._tend(journal)
        if journal is not None:
            self.records.keep_in(journal)
        seconds = recovery.seconds + time.monotonic() - began
        if found is not None:
            log.info("L1 recovered %d objects (%s) in %.2f s", len(self), ByteSize(self.used_bytes), seconds)
        return {
            "objects": len(self),
            "bytes": self.used_bytes,
            "seconds": round(seconds, 4),
            "why_cold": recovery.why_cold,
        }

    def _tend(self, journal: Journal) -> None:
        journal.write_uses()
        for writer in self.earlier_writers:
            if not writer or not journals.may_write(self.arena_fd, writer):
                self.writer_ended(writer)
        if self.clock() >= self._serves_at:
            self._serves_at = math.inf
            journal.served()

    def _in_turns(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """Yield parts of `items`, each to be handled while this holds the lock; other threads get it in between."""
        for first in range(0, len(items), AT_ONCE):
            if first:
                # A thread that only releases a lock takes it again before a waiting thread has woken up.
                time.sleep(TURN_S)
            with self.lock:
                yield items[first : first + AT_ONCE]

    @locked
    def _on_ready(self, limit: int) -> None:
        self.allocator.grow(limit)


class Verification:
    """The check of what L1 has from an earlier server: its bytes against the checksums that a tier was given, `known`,
    in a separate thread, at half speed. What is damaged is dropped; what no checksum is known of is not read.
    `layout_of` returns the fingerprint of a namespace's layout. The thread ends by itself, or with `stop`."""

    def __init__(self, l1: Table, known: Sequence[tuple[PackedKey, int]], layout_of: Callable[[bytes], bytes]) -> None:
        self._l1 = l1
        self.known = known
        self._layout_of = layout_of
        self._stop = threading.Event()
        self.verified = self.damaged = 0
        self._thread = threading.Thread(target=self._run, name="kvf-verification", daemon=True)
        self.start = self._thread.start

    def stop(self, timeout_s: float) -> bool:
        """End the check after the object that is read; return False if it has not ended by then."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    def _run(self) -> None:
        for first in range(0, len(self.known), VERIFY_AT_ONCE):
            began = time.monotonic()
            self._check(dict(self.known[first : first + VERIFY_AT_ONCE]))
            if self._stop.wait(time.monotonic() - began):
                return
        if self.known:
            log.info("verified %d recovered objects, %d of them were damaged", self.verified, self.damaged)

    def _check(self, checksums: dict[PackedKey, int]) -> None:
        pinned = self._l1.pin_present(list(checksums))
        damaged = []
        try:
            for stored in pinned:
                key = stored.key
                with self._l1.bytes_of(stored) as place:
                    # The layout may have been unknown when the checksum was made.
                    layouts = dict.fromkeys((self._layout_of(key[:16]), UNKNOWN_LAYOUT))
                    whole = any(object_checksum(key, place, layout) == checksums[key] for layout in layouts)
                if whole:
                    self.verified += 1
                else:
                    damaged.append(key)
        finally:
            self._l1.release(pinned)
        for key in damaged:
            self.damaged += 1
            log.error("dropped a recovered object that is damaged (key %s)", key.hex())
            while not self._l1.drop_damaged(key) and not self._stop.wait(AGAIN_S):
                pass
