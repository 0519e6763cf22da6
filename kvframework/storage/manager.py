"""L1 as a whole: arena, object table, eviction, and the way to and from L2.

Thread-safe: one lock around the object table, held for microseconds and never during I/O. Called from the serving
thread and from the storage threads.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvframework.api import EvictionPolicy, Memory, MemoryLayoutDesc, PackedKey, Select
from kvframework.bounded import call_within
from kvframework.storage.l1.allocator import RangeAllocator
from kvframework.storage.l1.leases import INTERNAL_OWNER, NO_DEADLINE, PinLease, StoredObject
from kvframework.storage.l1.objects import ObjectTable, Reservation
from kvframework.storage.l2.loading import LoadTask
from kvframework.storage.l2.prefetch import Prefetcher
from kvframework.storage.l2.store import L2Store
from kvframework.storage.l2.threads import Controller, StorageThreads
from kvframework.storage.l2.tiers import AttachedTier, Tiers
from kvframework.storage.namespaces import NamespaceRecord, NamespaceRecords

log = logging.getLogger(__name__)

T = TypeVar("T")

# What a call to a tier may take beyond its timeout before `close` stops waiting for it.
CLOSE_GRACE_S = 1.0
# What the arena's plugin has at least for its end.
ARENA_END_S = 0.2
# Work on many objects holds the lock for as many at a time, a few milliseconds, and leaves it for so long between.
AT_ONCE = 512
TURN_S = 0.001
# Objects that one tick evicts: as many as the serving thread can spare the time for.
EVICT_AT_ONCE = 2048

COUNTERS = ("stored", "dropped", "aborted", "loaded", "retrieves", "retrieve_misses")


class StorageManager:
    """`memory` and the tiers are owned from here on and closed by `close`; `records` are also the stores'. Without
    `threads` nothing happens in the background: a simulation drives the `controllers` itself, each with the number of
    its threads."""

    def __init__(
        self,
        memory: Memory,
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
        # The last tick has not come down to the low watermark.
        self._lowering = False
        self._tiers = Tiers(self, tiers, self.records, clock)
        self._table = ObjectTable(RangeAllocator(), policy, self._tiers.removed)
        # Only for who holds the lock, and for as long: the objects are the table's.
        self.row = self._table.row
        self._prefetcher = Prefetcher(self, self._tiers.stores, clock)
        writing = [(writer, tier.writes) for writer, tier in zip(self._tiers.writers, tiers, strict=True)]
        loading = [(queue, tier.loads) for queue, tier in zip(self._prefetcher.queues, tiers, strict=True)]
        self.controllers: list[tuple[Controller, int]] = [*writing, *loading]
        self._threads = StorageThreads(self.controllers) if threads else None
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
    def has_tiers(self) -> bool:
        return bool(self._tiers.stores)

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
        with self.lock:
            objects = self._table.commit(lease_id, owner=owner, now=self.clock())
            self._writers_ended()
            self.counters["stored"] += len(objects)
            self._tiers.committed([stored.key for stored in objects])
            return len(objects)

    def abort(self, lease_id: str, *, owner: int) -> int:
        with self.lock:
            freed = self._table.abort(lease_id, owner=owner)
            self._writers_ended()
            self.counters["aborted"] += freed
            return freed

    # reading

    def which_present(self, keys: Sequence[PackedKey]) -> list[bool]:
        with self.lock:
            return self._table.which(keys)

    def pin(self, keys: Sequence[PackedKey], *, owner: int, request_id: str, lease_s: float | None) -> PinLease | None:
        """Pins all keys, or none and returns None if one is missing. A use of each."""
        with self.lock:
            objects = self._table.find(keys)
            if objects is None:
                return None
            return self.pin_objects(objects, owner=owner, request_id=request_id, lease_s=lease_s)

    def pin_objects(
        self, objects: list[StoredObject], *, owner: int, request_id: str, lease_s: float | None
    ) -> PinLease:
        """Pins what `row` has found since the caller took the lock, see `ObjectTable.pin_objects`."""
        with self.lock:
            deadline = NO_DEADLINE if lease_s is None else self.clock() + lease_s
            lease = self._table.pin_objects(objects, owner=owner, request_id=request_id, deadline=deadline)
            if self._tiers.watches_uses:
                self._tiers.used([stored.key for stored in objects])
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
        by_group = {index.to_bytes(4, "little"): group.nbytes for index, group in enumerate(layout_desc.groups)}
        sizes = [by_group[key[36:40]] for key in keys]
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
        with self.lock:
            ended = self._table.withdraw(owner, request_id)
            self._writers_ended()
            return ended

    def end_owner(self, owner: int) -> int:
        """Ends all leases of a client that is gone; the number ended."""
        with self.lock:
            ended = self._table.end_owner(owner)
            self._writers_ended()
            return ended

    def clear(self, *, l2: bool = False) -> tuple[int, int]:
        """Drops what was here when it was called and nobody uses at its turn: (objects dropped, objects in use).

        What is stored meanwhile stays, also where it has the name of something that was dropped. Blocks, but not the
        others: takes the lock for some hundred objects at a time. With `l2` also deletes the dropped objects in every
        tier; raises `TierError`, after all were asked, if one failed.
        """
        with self.lock:
            objects = self._table.objects()
        dropped: list[StoredObject] = []
        in_use = 0
        for part in self._in_turns(objects):
            gone, used = self._table.drop_unused(part)
            dropped += gone
            in_use += used
        if l2:
            self._tiers.delete([stored.key for stored in dropped])
        return len(dropped), in_use

    def tick(self) -> None:
        """To be called every 100 ms or so: expires leases, and above the high watermark evicts down to the low one,
        but not what a write policy has to write before. What is more than one call may do is done by the next ones."""
        with self.lock:
            self._table.expire(self.clock())
            self._table.tell_uses()
            self._writers_ended()
            above = self._high < 1.0 and self._table.used_bytes > self._high * self.capacity
            if above or self._lowering:
                victims = self._candidates()
                kept = self._tiers.leaving(victims)
                going = [key for key in victims if key not in kept]
                self._table.evict(going[:EVICT_AT_ONCE])
                self._lowering = len(going) > EVICT_AT_ONCE

    def close(self, drain_s: float = 0.0, end_s: float | None = None, *, process_ends: bool = False) -> None:
        """Waits up to `drain_s` for what is on its way to L2, then closes the tiers, which ends the calls in flight,
        stops all threads and frees the arena within `end_s` (None: the longest timeout of a tier). Idempotent; not to
        be called from a storage thread.

        A thread that a tier does not let go, or a copy that a transport has not ended, keeps the arena mapped, since it
        may still write there. If the process ends right afterwards, memory that ends with it is left to the kernel.
        """
        self._tiers.drain(drain_s)
        self._tiers.stop()
        self._prefetcher.stop()
        longest = max((store.timeout_s for store in self._tiers.stores), default=0.0)
        end_s = CLOSE_GRACE_S + longest if end_s is None else end_s
        deadline = time.monotonic() + end_s
        # The calls in flight of a tier that closes end after that.
        self._tiers.close(end_s / 2)
        if self._threads is not None and not self._threads.join(deadline - time.monotonic()):
            log.error("a tier blocks a storage thread past its deadline; the arena stays mapped")
            return
        if process_ends:
            with contextlib.suppress(BufferError):  # a transport's, see `Memory.leave`
                self._arena.release()
            if call_within(max(deadline - time.monotonic(), ARENA_END_S), {"the arena": self._memory.leave}):
                log.error("closing the arena takes too long")
            return
        try:
            self._arena.release()
            self._memory.close()
        except BufferError:
            log.error("a transport keeps views of the arena after its last request; the arena stays mapped")

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

    # what writers and prefetch use

    def pin_present(self, keys: Sequence[PackedKey]) -> list[PinLease]:
        """One pin for each of `keys` that is in L1, without counting as an access for eviction."""
        leases = [self._pin_internal(key) for part in self._in_turns(keys) for key in part]
        return [lease for lease in leases if lease is not None]

    def pin_found(self, objects: list[StoredObject]) -> PinLease:
        """Pins objects that the caller has just found, for the server itself; no access for eviction."""
        with self.lock:
            return self._table.pin_objects(
                objects, owner=INTERNAL_OWNER, request_id="", deadline=NO_DEADLINE, touch=False
            )

    def unpin_internal(self, leases: Sequence[PinLease]) -> None:
        for part in self._in_turns(leases):
            for lease in part:
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
        with self.lock:
            if not good:
                self._table.abort(lease_id, owner=INTERNAL_OWNER)
                self._writers_ended()
                return None
            objects = self._table.commit(lease_id, owner=INTERNAL_OWNER, now=self.clock())
            self._writers_ended()
            self.counters["loaded"] += len(objects)
            return self._pin_internal(objects[0].key)

    def loaded(self, keys: Sequence[PackedKey], source: L2Store) -> None:
        """Tells the tiers what came from one of them."""
        self._tiers.loaded(keys, source)

    def any_writing(self, keys: Sequence[PackedKey]) -> bool:
        """Whether one of `keys` is reserved and not published; `Prefetcher.writers_ended` follows its end."""
        with self.lock:
            return self._table.any_writing(keys)

    def _writers_ended(self) -> None:
        """Under the lock."""
        self._prefetcher.writers_ended(self._table.any_writing)

    def _pin_internal(self, key: PackedKey) -> PinLease | None:
        return self._table.pin([key], owner=INTERNAL_OWNER, request_id="", deadline=NO_DEADLINE, touch=False)

    def _in_turns(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """Parts of `items`, each to be handled while this holds the lock; between two of them others get it."""
        for first in range(0, len(items), AT_ONCE):
            if first:
                # Who only releases a lock has it again before a thread that waits is awake.
                time.sleep(TURN_S)
            with self.lock:
                yield items[first : first + AT_ONCE]

    def _candidates(self) -> list[PackedKey]:
        """What is to leave above the high watermark."""
        return self._table.candidates(int(self._low * self.capacity))

    def _on_ready(self, limit: int) -> None:
        with self.lock:
            self._table.allocator.grow(limit)
