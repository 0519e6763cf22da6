"""L1: the arena, and the table of its objects under one lock.

Thread-safe: the lock is held for microseconds and never during I/O. Called from the serving thread and from the storage
threads. The tiers hear what comes, is used, and leaves.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from kvframework.api.eviction import EvictionPolicy, PackedKey, Use
from kvframework.api.keys import DIGEST_BYTES
from kvframework.api.memory import Memory
from kvframework.api.plugin import ByteSize
from kvframework.overdue import call_within
from kvframework.record_ring import NO_RECORDS, RecordRing
from kvframework.status import L1Counters, zeros
from kvframework.storage.l1.entries import NO_CLIENT, Account, AccountKey, RangeAllocator, StoredObject
from kvframework.storage.l1.eviction import Tenant
from kvframework.storage.l1.eviction_statistics import MOST_DROPPED, Cause, EvictionStatistics, FindRow, Ghost
from kvframework.storage.l1.journal import Journal, description_for, lock_for_server, may_write, writer_of
from kvframework.storage.l1.journal_format import FIRST_GENERATION, Identity
from kvframework.storage.l1.leases import (
    INTERNAL_OWNER,
    NO_DEADLINE,
    NO_PROMPT,
    PinLease,
    Pinned,
    PromptPart,
    Reservation,
)
from kvframework.storage.l1.objects import ObjectTable
from kvframework.storage.l2.tiers import Tiers
from kvframework.storage.namespaces import NamespaceRecords, decode_record
from kvframework.storage.recovery import NOT_RECOVERED, Recovery, Verification

log = logging.getLogger(__name__)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# A server that has lived for this long has not failed to start.
SERVED_S = 1.0
# Least time that the arena's plugin gets to close.
ARENA_END_S = 0.2
# Work on many objects holds the lock for this number at a time, a few milliseconds, with this pause in between.
AT_ONCE = 512
TURN_S = 0.001
# Objects that one tick evicts, a bound on the time it takes from the serving thread.
EVICT_AT_ONCE = 2048


def _locked(method: F) -> F:
    """Decorator: call the method under the storage lock."""

    @functools.wraps(method)
    def call(self: Table, /, *arguments: Any, **named: Any) -> Any:
        with self.lock:
            return method(self, *arguments, **named)

    return cast("F", call)


class Table:
    """`memory` and `recovery` are owned from here on and closed by `close`. `policy` orders the objects of no named
    tenant. `ghosts` is the number of keys that left L1 that are remembered. `ring` gets the records of what comes
    into L1, and leaves it."""

    # Set before any other call.
    tiers: Tiers

    def __init__(
        self,
        memory: Memory,
        policy: EvictionPolicy,
        records: NamespaceRecords,
        *,
        high_watermark: float = 1.0,
        low_watermark: float = 0.9,
        ghosts: int = 0,
        tenants: Sequence[Tenant] = (),
        recovery: Recovery = NOT_RECOVERED,
        ring: RecordRing = NO_RECORDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self.counters = Counter(zeros(L1Counters))
        self._records = records
        self._ring = ring
        self._came: list[Callable[[Sequence[PackedKey]], None]] = [ring.added] if ring.wanted else []
        self._memory = memory
        # For server-driven transports; valid until `close`.
        self.arena = memory.view()
        self._high, self._low = high_watermark, low_watermark
        # The last tick did not reach the low watermark.
        self._lowering = False
        self._statistics = EvictionStatistics(self.capacity, ghosts, records.model_of, clock)
        # The seconds in which engines compute a token, as far as they say, and a byte is loaded: both as of the last
        # tick, for the eviction policy.
        self.compute_s: float | None = None
        self._prices: tuple[float | None, float | None] = None, None
        journal, done = recovery.journal, self._statistics.was_done
        self._table = ObjectTable(RangeAllocator(), policy, self._left, tenants, journal, lambda: self._prices, done)
        self.tenants = self._table.tenants
        self._journal = recovery.journal
        self._serves_at = clock() + SERVED_S
        self._shared = False
        self._recovered = self._adopt(recovery)
        # For who holds the lock: the objects are the table's.
        self.row = self._table.row
        self.looked_up = self._statistics.looked_up
        found = recovery.found.slots.objects if recovery.found is not None else ()
        known = [(each.key, each.checksum) for each in found if each.checksum]
        self.verification = Verification(self, known, records.layout_of)
        memory.start(self._on_ready)

    @property
    def arena_fd(self) -> int:
        return self._memory.fd

    def arena_for(self, session: int) -> int:
        """Return a descriptor of the arena for a client's session, owned by the caller. A later server knows by it
        whether the client may still write, see `kvframework.storage.l1.journal`. Raises `OSError`."""
        generation = FIRST_GENERATION if self._journal is None else self._journal.generation
        try:
            return description_for(self._memory.fd, writer_of(generation, session))
        except OSError:
            if self._journal is not None:
                raise
            self._shared = True  # the description of all: no other server can know who still writes
            return os.dup(self._memory.fd)

    @property
    def is_recoverable(self) -> bool:
        """Whether a next server finds what L1 holds."""
        return self._journal is not None

    @property
    def began_empty(self) -> bool:
        """Whether L1 began without any object of an earlier server."""
        return not self._recovered["objects"]

    @_locked
    def hand_over(self, identity: Identity, tenants: Sequence[str]) -> tuple[int, int]:
        """Return the descriptors of the arena and of the journal, borrowed; without a keeper the journal begins here,
        which takes some microseconds an object. Raises `OSError`, and `ValueError` for too many tenants."""
        if self._journal is None:
            if self._shared or not lock_for_server(self._memory.fd):
                raise OSError(errno.EBUSY, "clients share this server's description of the arena")
            journal = Journal.create(identity.of(self._memory.fd), tenants)
            self._table.keep_in(journal)
            self._journal = journal
            self._records.keep_in(journal)
        return self._memory.fd, self._journal.fd

    @property
    def capacity(self) -> int:
        return int(self._memory.capacity)

    @_locked
    def count(self, **amounts: int) -> None:
        """Add to the counters that `status` shows."""
        self.counters.update(amounts)

    @_locked
    def configure_share(self, pin_share: float) -> None:
        """Change the share of L1 that one session may keep from eviction while others need room, see `PinShares`."""
        self._table.shares.configure(pin_share * self.capacity)

    @_locked
    def work_for(self, session: int, payer: int) -> None:
        """Let what a session pins count for another one of its engine."""
        self._table.shares.work_for(session, payer)

    def over_share(self, session: int) -> bool:
        """Whether a session holds more than its share of L1."""
        return self._table.shares.payer(session) in self._table.shares.over

    @_locked
    def pinned_bytes(self) -> dict[int, Pinned]:
        """Return what each session keeps from eviction."""
        return self._table.shares.by_session()

    @_locked
    def configure(self, *, high_watermark: float, low_watermark: float) -> None:
        """Change the watermarks."""
        self._high, self._low = high_watermark, low_watermark

    # writing

    @_locked
    def reserve(
        self,
        items: Sequence[tuple[PackedKey, int]],
        *,
        owner: int,
        request_id: str,
        lease_s: float | None,
        share: float = 1.0,
        client: int = NO_CLIENT,
        payer: int = NO_CLIENT,
        use: Use = "store",
        prompt: PromptPart = NO_PROMPT,
    ) -> Reservation:
        """Reserve ranges, see `ObjectTable.reserve`; `lease_s` None means no deadline (the server itself writes).
        `share` of the capacity bounds the owner's reserved bytes; `client` is the session whose account has them."""
        deadline = NO_DEADLINE if lease_s is None else self.clock() + lease_s
        present = [key for key, _ in items if key in self._table] if self.tiers.watches_uses else ()
        used = self._table.used_bytes
        most = None if share >= 1.0 else int(share * self.capacity)
        result = self._table.reserve(
            items,
            owner=owner,
            request_id=request_id,
            deadline=deadline,
            most_bytes=most,
            client=client,
            payer=payer,
            use=use,
            prompt=prompt,
        )
        if used <= self._high * self.capacity < self._table.used_bytes:
            # Reported at once, so that later victims can be written before their eviction.
            self.tiers.leaving(self._table.candidates(int(self._low * self.capacity)))
        self.counters["dropped"] += result.dropped
        if result.stopped_at is not None:
            cause = Cause.DROPPED_SHARE if result.over_share else Cause.DROPPED_FULL
            if result.refused:
                cause = Cause.REFUSED
            first = result.stopped_at
            dropped = [key for key, _ in items[first : first + MOST_DROPPED] if key not in self._table]
            self._statistics.lost(dropped, cause)
        if present:
            self.tiers.used(present)
        return result

    def reserve_some(
        self,
        items: Sequence[tuple[PackedKey, int]],
        some: Collection[int],
        *,
        owner: int,
        request_id: str,
        lease_s: float | None,
        client: int = NO_CLIENT,
        prompt: PromptPart = NO_PROMPT,
    ) -> Reservation:
        """Reserve ranges for the items with the indices `some`, see `reserve`. Other present items are pinned with the
        lease, so that the end of a prefix never evicts its beginning; they do not count in the result."""
        with self.lock:
            here = self._table.which([key for key, _ in items])
            chosen = [index for index, present in enumerate(here) if present or index in some]
            result = self.reserve(
                [items[index] for index in chosen],
                owner=owner,
                request_id=request_id,
                lease_s=lease_s,
                client=client,
                prompt=prompt._replace(chunks=prompt.of(chosen)),
            )
        result.present -= len(chosen) - len(some)
        result.placed = [(chosen[at], offset) for at, offset in result.placed]
        return result

    def belongs(self, salt: bytes, tenant: int) -> None:
        """Remember that objects whose keys have this salt are of the tenant with this number, from 1, in the order of
        `tenants`. Takes the lock only for a salt that is not remembered."""
        if not self._table.tenants.knows(salt):
            with self.lock:
                self._table.tenants.learn(salt, tenant)

    @_locked
    def lease_size(self, lease_id: str, *, owner: int) -> int:
        """Return the number of objects of a write lease. Raises `LeaseUnknown`."""
        return self._table.lease_size(lease_id, owner=owner)

    @_locked
    def commit(self, lease_id: str, *, owner: int) -> int:
        """Publish a lease and queue its objects for L2; return the number published, 0 if the lease had expired."""
        objects = self._commit(lease_id, owner)
        self.counters["stored"] += len(objects)
        self.tiers.committed([stored.key for stored in objects])
        return len(objects)

    @_locked
    def abort(self, lease_id: str, *, owner: int) -> int:
        freed = self._table.abort(lease_id, owner=owner)
        self._writers_ended()
        self.counters["aborted"] += freed
        return freed

    # reading

    @_locked
    def which_present(self, keys: Sequence[PackedKey]) -> list[bool]:
        return self._table.which(keys)

    @_locked
    def use_present(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return which of `keys` L1 has; counts as a use of each."""
        here = self._table.use(keys)
        if self.tiers.watches_uses:
            self.tiers.used([key for key, present in zip(keys, here, strict=True) if present])
        return here

    def account(self, client: int, namespace: bytes, tenant: int) -> Account:
        """Return the account of a client session, see `Accounts`; takes the lock only to make it."""
        accounts = self._table.accounts
        account = accounts.get((client, namespace, tenant))
        if account is None:
            with self.lock:
                account = accounts.of(client, namespace, tenant)
        return account

    def accounts(self) -> list[tuple[AccountKey, Account]]:
        """Return all accounts; their numbers go on changing."""
        return self._table.accounts.items()

    @_locked
    def in_rows(self, look: Callable[[FindRow], T]) -> T:
        """Return what `look` finds in the rows of L1."""
        return look(self.row)

    def absent(self, key: PackedKey, most: int) -> tuple[Ghost | None, list[bytes]]:
        """Return why L1 lacks the object, as far as that is remembered; if it is not, the key prefixes, of the `most`
        latest ones, under which L1 has an object of the same chunk."""
        with self.lock:
            ghost = self._statistics.ghost(key)
            return ghost, [] if ghost else self._table.prefixes_with(key[-DIGEST_BYTES:], most)

    @_locked
    def pin(self, keys: Sequence[PackedKey], *, owner: int, request_id: str, lease_s: float | None) -> PinLease | None:
        """Pin all keys, which counts as a use of each; pins none and returns None if one is missing, or the owner's
        share of L1 is pinned."""
        objects = self._table.find(keys)
        if objects is None:
            return None
        lease = self.pin_objects(objects, owner=owner, request_id=request_id, lease_s=lease_s)
        return lease if self._table.keep_within_share(lease) else None

    def pin_objects(
        self,
        objects: list[StoredObject],
        *,
        owner: int,
        request_id: str,
        lease_s: float | None,
        use: Use | None = "lookup",
        prompt: PromptPart = NO_PROMPT,
        asked_by: int | None = None,
        hit: bool = False,
    ) -> PinLease:
        """Pin objects that `row` has found since the caller took the lock, see `ObjectTable.pin_objects`; a `use` of
        each, unless that is None."""
        with self.lock:
            deadline = NO_DEADLINE if lease_s is None else self.clock() + lease_s
            lease = self._table.pin_objects(
                objects,
                owner=owner,
                request_id=request_id,
                deadline=deadline,
                use=use,
                prompt=prompt,
                asked_by=asked_by,
                hit=hit,
            )
            if use and self.tiers.watches_uses:
                self.tiers.used([stored.key for stored in objects])
        return lease

    @_locked
    def pin_found(
        self,
        find: Callable[[FindRow], list[StoredObject] | None],
        *,
        owner: int,
        request_id: str,
        lease_s: float | None,
        prompt: PromptPart = NO_PROMPT,
        asked_by: int | None = None,
    ) -> PinLease | None:
        """Pin the objects that `find` finds in the rows of L1, which counts as a use of each; None if `find` returns
        None, or the share of L1 of the session that asks is pinned."""
        objects = find(self.row)
        if objects is None:
            return None
        self._table.reads(owner if asked_by is None else asked_by, request_id, objects)
        lease = self.pin_objects(
            objects,
            owner=owner,
            request_id=request_id,
            lease_s=lease_s,
            use="retrieve",
            prompt=prompt,
            asked_by=asked_by,
        )
        return lease if self._table.keep_within_share(lease) else None

    @_locked
    def pinned(self, lease_id: str, *, owner: int) -> list[StoredObject] | None:
        """Return the objects under a pin lease, None if it has lapsed. Raises `LeaseUnknown`."""
        return self._table.pinned(lease_id, owner=owner, now=self.clock())

    @_locked
    def unpin(self, lease_id: str, *, owner: int, use: Use | None = None, prompt: PromptPart = NO_PROMPT) -> PinLease:
        """End a pin lease, see `ObjectTable.unpin`. Raises `LeaseUnknown`."""
        lease = self._table.unpin(lease_id, owner=owner, now=self.clock(), use=use, prompt=prompt)
        if use and self.tiers.watches_uses:
            self.tiers.used([stored.key for stored in lease.objects])
        return lease

    @_locked
    def watch(self, came: Callable[[Sequence[PackedKey]], None]) -> None:
        """Call `came`, under the lock, with the objects of L1 now, and with those that come, from then on."""
        came([stored.key for stored in self._table.objects()])
        self._came.append(came)

    # ends

    @_locked
    def cancel(self, owner: int, request_id: str | None = None) -> int:
        """End the claims of a live client (for one of its requests), see `ObjectTable.cancel`."""
        ended = self._table.cancel(owner, request_id)
        self._writers_ended()
        return ended

    @_locked
    def end_owner(self, owner: int) -> int:
        """End all leases of a client that has ended; return their number."""
        ended = self._table.end_owner(owner)
        self._writers_ended()
        return ended

    def drop_unused(self, wanted: Callable[[PackedKey], bool]) -> tuple[dict[PackedKey, int], int]:
        """Drop the wanted objects present at the call that are unused at their turn: (their sizes, number of those in
        use). Objects stored meanwhile stay, even under the name of a dropped one. Other callers take turns with it."""
        with self.lock:
            objects = self._table.objects()
        dropped: dict[PackedKey, int] = {}
        in_use = 0
        for part in self._in_turns([stored for stored in objects if wanted(stored.key)]):
            gone, used = self._table.drop_unused(part)
            dropped.update((stored.key, stored.length) for stored in gone)
            in_use += used
        return dropped, in_use

    @_locked
    def tick(self) -> None:
        """Expire leases; above the high watermark, evict down to the low one, except for objects that a write policy
        must write before. Called about every 100 ms; each call is bounded, and the next ones continue."""
        self._table.expire(self.clock())
        self._table.report_uses()
        self._prices = self.compute_s, self.tiers.load_s()
        if self._journal is not None:
            self._tend(self._journal)
        self._writers_ended()
        if self.is_full:
            victims = self._table.candidates(int(self._low * self.capacity))
            kept = self.tiers.leaving(victims)
            going = [key for key in victims if key not in kept]
            self._table.evict(going[:EVICT_AT_ONCE])
            self._lowering = len(going) > EVICT_AT_ONCE

    @property
    def is_full(self) -> bool:
        """Whether L1 is above its high watermark, or a tick has not reached the low one yet."""
        above = self._high < 1.0 and self._table.used_bytes > self._high * self.capacity
        return above or self._lowering

    @_locked
    def write_uses(self) -> None:
        """Record the latest uses for the next server, which is about to start."""
        if self._journal is not None:
            self._journal.write_uses()

    def close(self, deadline: float, *, process_ends: bool) -> None:
        """Free the arena. An unfinished copy of a transport keeps it mapped, since it may still write there. If the
        process ends right afterwards, the kernel frees memory that ends with it."""
        if process_ends:
            with contextlib.suppress(BufferError):  # a transport's, see `Memory.leave`
                self.arena.release()
            if call_within(max(deadline - time.monotonic(), ARENA_END_S), {"the arena": self._memory.leave}):
                log.error("closing the arena takes too long")
            return
        try:
            self.arena.release()
            self._memory.close()
        except BufferError:
            log.error("a transport keeps views of the arena after its last request; the arena stays mapped")

    @_locked
    def status(self) -> dict[str, object]:
        table = self._table
        return {
            "capacity_bytes": self.capacity,
            **table.status(),
            "recovered": {**self._recovered, **self.verification.status()},
            "journal_bytes": self._journal.nbytes if self._journal is not None else 0,
            **self._statistics.status(),
            "counters": {
                **self.counters,
                "quarantined": table.quarantines,
                "lapsed": table.lapses,
                "over_share": table.shares.all_cuts,
            },
        }

    # for writers and loads, see `kvframework.storage.l2.sealed_tier.L1`

    def pin_present(self, keys: Sequence[PackedKey]) -> list[PinLease]:
        """Pin each of `keys` that is in L1, without counting as an access for eviction."""
        leases = [self._pin_internal(key) for part in self._in_turns(keys) for key in part]
        return [lease for lease in leases if lease is not None]

    @_locked
    def pin_again(self, lease_id: str, indices: Sequence[int], *, owner: int) -> PinLease | None:
        """Pin for the server itself the objects that the client `owner` has pinned under a lease; None if that has
        lapsed. Does not count as an access for eviction. Raises `LeaseUnknown`."""
        pinned = self.pinned(lease_id, owner=owner)
        if pinned is None:
            return None
        objects = [pinned[index] for index in indices]
        return self._table.pin_objects(
            objects, owner=INTERNAL_OWNER, request_id="", deadline=NO_DEADLINE, use=None, asked_by=owner
        )

    def release(self, leases: Sequence[PinLease]) -> None:
        for part in self._in_turns(leases):
            self._table.release(part)

    def bytes_of(self, lease: PinLease) -> memoryview:
        stored = lease.objects[0]
        return self.arena[stored.offset : stored.offset + stored.length]

    def reserve_load(
        self, key: PackedKey, nbytes: int, prompt: PromptPart, client: int
    ) -> tuple[str, memoryview] | None:
        """Return a place to load one object into, for a client; None if it is present, being written, or there is no
        room."""
        result = self.reserve(
            [(key, nbytes)], owner=INTERNAL_OWNER, request_id="", lease_s=None, payer=client, use="load", prompt=prompt
        )
        if result.lease is None:
            return None
        offset = result.placed[0][1]
        return result.lease.id, self.arena[offset : offset + nbytes]

    @_locked
    def finish_load(self, lease_id: str, good: bool) -> PinLease | None:
        """Publish and pin a loaded object, or free its place."""
        if not good:
            self._table.abort(lease_id, owner=INTERNAL_OWNER)
            self._writers_ended()
            return None
        objects = self._commit(lease_id, INTERNAL_OWNER)
        self.counters["loaded"] += len(objects)
        return self._pin_internal(objects[0].key)

    @_locked
    def any_writing(self, keys: Sequence[PackedKey]) -> bool:
        """Whether one of `keys` is reserved and not published; `Prefetcher.writers_ended` follows its end."""
        return self._table.any_writing(keys)

    def sealed(self, checksums: Mapping[PackedKey, int]) -> None:
        """Record the checksums of objects for the next server."""
        if self._journal is not None:
            with self.lock:
                self._table.sealed(checksums)

    @_locked
    def drop_damaged(self, key: PackedKey) -> bool:
        """Drop an object whose bytes are not what they were; False while it is pinned."""
        return self._table.drop(key, Cause.DAMAGED) or key not in self._table

    @_locked
    def damaged(self, key: PackedKey) -> None:
        """Record that the object's value in a tier is of no use."""
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
                    self._records.add(namespace, record, learned=learned)
            names = self._table.tenants.names
            tenants = [names.index(name) if name in names else 0 for name in found.start.tenants]
            self._table.adopt(found, tenants, now=self.clock())
            self._tend(journal)
        if journal is not None:
            self._records.keep_in(journal)
        table, seconds = self._table, recovery.seconds + time.monotonic() - began
        if found is not None:
            log.info("L1 recovered %d objects (%s) in %.2f s", len(table), ByteSize(table.used_bytes), seconds)
        return {
            "objects": len(table),
            "bytes": table.used_bytes,
            "seconds": round(seconds, 4),
            "why_cold": recovery.why_cold,
        }

    def _tend(self, journal: Journal) -> None:
        journal.write_uses()
        for writer in self._table.earlier_writers:
            if not writer or not may_write(self._memory.fd, writer):
                self._table.writer_ended(writer)
        if self.clock() >= self._serves_at:
            self._serves_at = math.inf
            journal.served()

    @_locked
    def served(self) -> None:
        """Record for the next server that this one's start has not failed: it has been asked to end."""
        if self._journal is not None:
            self._journal.served()

    def _commit(self, lease_id: str, owner: int) -> list[StoredObject]:
        objects = self._table.commit(lease_id, owner=owner, now=self.clock())
        keys = [stored.key for stored in objects]
        self._statistics.back(keys)
        for came in self._came:
            came(keys)
        self._writers_ended()
        return objects

    def _left(self, stored: StoredObject, cause: Cause, by: PackedKey | None) -> None:
        self._statistics.left(stored, cause, by)
        self.tiers.removed(stored.key)
        if self._ring.wanted:
            self._ring.removed(stored.key)

    def _writers_ended(self) -> None:
        """Report ended writers to the loads that wait for one; the caller holds the lock."""
        # A load that begins to wait now checks by itself.
        self.tiers.writers_ended(self._table.any_writing)

    def _pin_internal(self, key: PackedKey) -> PinLease | None:
        return self._table.hold(key)

    def _in_turns(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """Yield parts of `items`, each to be handled while this holds the lock; other threads get it in between."""
        if 0 < len(items) <= AT_ONCE:
            with self.lock:
                yield items
            return
        for first in range(0, len(items), AT_ONCE):
            if first:
                # A thread that only releases a lock takes it again before a waiting thread has woken up.
                time.sleep(TURN_S)
            with self.lock:
                yield items[first : first + AT_ONCE]

    @_locked
    def _on_ready(self, limit: int) -> None:
        self._table.allocator.grow(limit)
