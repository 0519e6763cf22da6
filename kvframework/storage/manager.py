"""Owns L1 as a whole: arena, object table, eviction, and the way to and from L2.

Thread-safe: one lock around the object table, held for microseconds and never during I/O. Called from the serving
thread and from the storage threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvframework.api import EvictionPolicy, L1Memory, MemoryLayoutDesc, PackedKey, Select
from kvframework.storage.allocator import RangeAllocator
from kvframework.storage.l2 import L2Store
from kvframework.storage.leases import INTERNAL_OWNER, NO_DEADLINE, PinLease, StoredObject
from kvframework.storage.loading import LoadTask
from kvframework.storage.namespaces import NamespaceRecord, NamespaceRecords
from kvframework.storage.objects import ObjectTable, Reservation
from kvframework.storage.prefetch import Prefetcher
from kvframework.storage.threads import StorageThreads
from kvframework.storage.tiers import AttachedTier, Tiers

log = logging.getLogger(__name__)

# What a call to a tier may take beyond its timeout before `close` stops waiting for it.
CLOSE_GRACE_S = 1.0

COUNTERS = ("stored", "dropped", "aborted", "loaded", "retrieves", "retrieve_misses")


class StorageManager:
    """`memory` and the tiers are owned from here on and closed by `close`; `records` are also the stores'. Without
    `threads` nothing happens in the background: a simulation drives `controllers` itself."""

    def __init__(
        self,
        memory: L1Memory,
        policy: EvictionPolicy,
        tiers: Sequence[AttachedTier] = (),
        *,
        records: NamespaceRecords | None = None,
        high_watermark: float = 1.0,
        low_watermark: float = 0.9,
        clock: Callable[[], float] = time.monotonic,
        threads: bool = True,
    ) -> None:
        self.records = records or NamespaceRecords()
        self.lock = threading.RLock()
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self._memory = memory
        self._arena = memory.view()
        self.clock = clock
        self._high, self._low = high_watermark, low_watermark
        self._written = threading.Condition(self.lock)
        self._closing = False
        self._tiers = Tiers(self, tiers, self.records, clock)
        self._table = ObjectTable(RangeAllocator(), policy, self._tiers.removed)
        self._prefetcher = Prefetcher(self, self._tiers.stores)
        self.controllers = (*self._tiers.writebacks, self._prefetcher)
        self._threads = StorageThreads(self._tiers.writebacks, self._prefetcher) if threads else None
        memory.start(self._on_ready)

    @property
    def arena(self) -> memoryview:
        """The whole arena, for server-driven transports; valid until `close`."""
        return self._arena

    @property
    def arena_fd(self) -> int:
        return self._memory.fd

    @property
    def capacity(self) -> int:
        return int(self._memory.capacity)

    @property
    def ready_bytes(self) -> int:
        """How much of the capacity is resident and may be handed out."""
        with self.lock:
            return self._table.allocator.limit

    def count(self, **amounts: int) -> None:
        """Adds to the counters that `status` shows."""
        with self.lock:
            self.counters.update(amounts)

    # writing

    def reserve(
        self,
        items: Sequence[tuple[PackedKey, int]],
        *,
        owner: int,
        request_id: str,
        lease_s: float | None,
        share: float = 1.0,
    ) -> Reservation:
        """See `ObjectTable.reserve`; `lease_s` None: no deadline (the server itself writes). `share` of the capacity is
        what the owner may have reserved at once."""
        with self.lock:
            deadline = NO_DEADLINE if lease_s is None else self.clock() + lease_s
            present = [key for key, _ in items if key in self._table] if self._tiers.watches_uses else ()
            used = self._table.used_bytes
            most = None if share >= 1.0 else int(share * self.capacity)
            result = self._table.reserve(items, owner=owner, request_id=request_id, deadline=deadline, most_bytes=most)
            if used <= self._high * self.capacity < self._table.used_bytes:
                # Told at once, so that what the next ones push out has a chance to be written before.
                self._tiers.leaving(self._candidates())
            self.counters["dropped"] += result.dropped
            if present:
                self._tiers.used(present)
            return result

    def lease_size(self, lease_id: str, *, owner: int) -> int:
        """The number of objects that a write lease holds. Raises `LeaseUnknown`."""
        with self.lock:
            return self._table.lease_size(lease_id, owner=owner)

    def commit(self, lease_id: str, *, owner: int) -> int:
        """Publishes a lease and queues its objects for L2; the number published, 0 if the lease had expired."""
        with self._written:
            objects = self._table.commit(lease_id, owner=owner, now=self.clock())
            self._written.notify_all()
            self.counters["stored"] += len(objects)
            self._tiers.committed([stored.key for stored in objects])
            return len(objects)

    def abort(self, lease_id: str, *, owner: int) -> int:
        with self._written:
            freed = self._table.abort(lease_id, owner=owner)
            self._written.notify_all()
            self.counters["aborted"] += freed
            return freed

    # reading

    def which_present(self, keys: Sequence[PackedKey]) -> list[bool]:
        with self.lock:
            return [key in self._table for key in keys]

    def pin(self, keys: Sequence[PackedKey], *, owner: int, request_id: str, lease_s: float | None) -> PinLease | None:
        """Pins all keys or none, see `ObjectTable.pin`."""
        with self.lock:
            deadline = NO_DEADLINE if lease_s is None else self.clock() + lease_s
            lease = self._table.pin(keys, owner=owner, request_id=request_id, deadline=deadline)
            if lease is not None and self._tiers.watches_uses:
                self._tiers.used(keys)
            return lease

    def pinned(self, lease_id: str, *, owner: int) -> list[StoredObject] | None:
        """The objects under a pin lease, None if it has lapsed. Raises `LeaseUnknown`."""
        with self.lock:
            return self._table.pinned(lease_id, owner=owner, now=self.clock())

    def unpin(self, lease_id: str, *, owner: int) -> PinLease:
        with self.lock:
            return self._table.unpin(lease_id, owner=owner, now=self.clock())

    def submit_prefetch_task(
        self,
        keys: Sequence[PackedKey],
        layout_desc: MemoryLayoutDesc,
        *,
        select: Select | None = None,
        on_done: Callable[[], None] = lambda: None,
    ) -> LoadTask | None:
        """Loads from L2 what L1 lacks of `keys`, in the background, keeping their order.

        Object sizes follow from `layout_desc` by each key's layer group. `select` picks, once the tiers have said what
        they hold, the indices worth having (default: all); it is asked again after a loss. `on_done` runs once in a
        storage thread while what the task chose and could get is still pinned, also after a failure or a cancel. None
        if there is no tier, too much is under way, or the manager is closed.
        """
        by_group = [group.nbytes for group in layout_desc.groups]
        sizes = [by_group[int.from_bytes(key[36:40], "little")] for key in keys]
        task = LoadTask(keys, sizes, select or (lambda available: range(len(available))))
        return task if self._prefetcher.submit(task, on_done) else None

    def submit_record_task(self, namespace: bytes, on_done: Callable[[], None]) -> bool:
        """Asks L2 for a namespace's record and adds it to `records`; `on_done` runs in a storage thread."""

        def finish(record: NamespaceRecord | None) -> None:
            try:
                if record is not None:
                    self.records.add(namespace, record, learned=True)
            finally:
                on_done()

        return self._prefetcher.submit_record(namespace, finish)

    # ends

    def withdraw(self, owner: int, request_id: str | None = None) -> int:
        """Ends what a client that lives claims (for one of its requests), see `ObjectTable.withdraw`."""
        with self._written:
            ended = self._table.withdraw(owner, request_id)
            self._written.notify_all()
            return ended

    def end_owner(self, owner: int) -> int:
        """Ends all leases of a client that is gone; the number ended."""
        with self._written:
            ended = self._table.end_owner(owner)
            self._written.notify_all()
            return ended

    def clear(self, *, l2: bool = False) -> tuple[int, int]:
        """Drops what nobody uses: (objects dropped, objects still in use). With `l2` queues nothing and deletes the
        dropped objects in every tier, blocking; raises `TierError`, after all were asked, if one failed."""
        with self.lock:
            dropped, in_use = self._table.clear()
        if l2:
            self._tiers.delete([stored.key for stored in dropped])
        return len(dropped), in_use

    def tick(self) -> None:
        """To be called every 100 ms or so: expires leases, and above the high watermark evicts down to the low one,
        but not what a write policy has to write before."""
        with self._written:
            self._table.expire(self.clock())
            self._written.notify_all()
            if self._high < 1.0 and self._table.used_bytes > self._high * self.capacity:
                victims = self._candidates()
                kept = self._tiers.leaving(victims)
                self._table.evict(key for key in victims if key not in kept)

    def close(self, drain_s: float = 0.0, end_s: float | None = None) -> None:
        """Waits up to `drain_s` for what is on its way to L2, then closes the tiers, which ends the calls in flight,
        stops all threads within `end_s` (None: the longest timeout of a tier) and frees the arena. Idempotent; not to
        be called from a storage thread.

        A thread that a tier does not let go, or a copy that a transport has not ended, keeps the arena mapped, since it
        may still write there.
        """
        self._tiers.drain(drain_s)
        self._tiers.stop()
        self._prefetcher.stop()
        with self._written:
            self._closing = True
            self._written.notify_all()
        self._tiers.close()
        longest = max((store.timeout_s for store in self._tiers.stores), default=0.0)
        deadline = time.monotonic() + (CLOSE_GRACE_S + longest if end_s is None else end_s)
        if self._threads is not None and not self._threads.join(deadline - time.monotonic()):
            log.error("a tier holds a storage thread beyond its deadline; the arena stays mapped")
            return
        try:
            self._arena.release()
            self._memory.close()
        except BufferError:
            log.error("a transport holds the arena beyond the end of its requests; it stays mapped")

    def status(self) -> dict[str, object]:
        with self.lock:
            table = self._table
            allocator = table.allocator
            return {
                "l1": {
                    "capacity_bytes": self.capacity,
                    "ready_bytes": allocator.limit,
                    "used_bytes": table.used_bytes,
                    "free_bytes": allocator.free_bytes,
                    "largest_free_bytes": allocator.largest_free,
                    "fragmentation": round(allocator.fragmentation, 4),
                    "quarantined_bytes": table.quarantined_bytes,
                    "objects": len(table),
                    "pins": table.pins,
                    "write_leases": table.write_leases,
                    "pin_leases": table.pin_leases,
                    "evictions": table.evictions,
                    "counters": {**self.counters, "quarantined": table.quarantines, "lapsed": table.lapses},
                },
                "l2": self._tiers.status(),
                "prefetch": {"in_flight": self._prefetcher.in_flight, "refused": self._prefetcher.refused},
            }

    # what write-back and prefetch use

    def pin_present(self, keys: Sequence[PackedKey]) -> list[PinLease]:
        """One pin for each of `keys` that is here; no use in the eyes of the policy."""
        with self.lock:
            leases = [self._pin_internal(key) for key in keys]
        return [lease for lease in leases if lease is not None]

    def unpin_internal(self, leases: Sequence[PinLease]) -> None:
        with self.lock:
            for lease in leases:
                self._table.unpin(lease.id, owner=INTERNAL_OWNER, now=self.clock())

    def bytes_of(self, lease: PinLease) -> memoryview:
        stored = lease.objects[0]
        return self._arena[stored.offset : stored.offset + stored.length]

    def reserve_load(self, key: PackedKey, nbytes: int) -> tuple[str, memoryview] | None:
        """A place to load one object into, None if it is here, on its way, or there is no room."""
        result = self.reserve([(key, nbytes)], owner=INTERNAL_OWNER, request_id="", lease_s=None)
        if result.lease is None:
            return None
        offset = result.placed[0][1]
        return result.lease.id, self._arena[offset : offset + nbytes]

    def finish_load(self, lease_id: str, good: bool) -> PinLease | None:
        """Publishes and pins a loaded object, or frees its place."""
        with self._written:
            if not good:
                self._table.abort(lease_id, owner=INTERNAL_OWNER)
                self._written.notify_all()
                return None
            objects = self._table.commit(lease_id, owner=INTERNAL_OWNER, now=self.clock())
            self._written.notify_all()
            self.counters["loaded"] += len(objects)
            return self._pin_internal(objects[0].key)

    def loaded(self, keys: Sequence[PackedKey], source: L2Store) -> None:
        """Tells the tiers what came from one of them."""
        self._tiers.loaded(keys, source)

    def wait_written(self, keys: Sequence[PackedKey], timeout_s: float) -> None:
        """Waits until none of `keys` is being written by anybody, at most `timeout_s` and until `close`."""
        with self._written:
            self._written.wait_for(lambda: self._closing or not self._table.any_writing(keys), timeout_s)

    def _pin_internal(self, key: PackedKey) -> PinLease | None:
        return self._table.pin([key], owner=INTERNAL_OWNER, request_id="", deadline=NO_DEADLINE, touch=False)

    def _candidates(self) -> list[PackedKey]:
        """What is to leave above the high watermark."""
        return self._table.candidates(int(self._low * self.capacity))

    def _on_ready(self, limit: int) -> None:
        with self.lock:
            self._table.allocator.grow(limit)
