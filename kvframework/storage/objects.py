"""Owns the object table: which object lies where in the arena, who writes it, who has it pinned.

A pure state machine: no I/O, no clock of its own (`now` is passed in, seconds on any monotonic clock), no lock (the
storage manager serialises calls). Invariants, tested against a model:

* Only committed objects are readable; what was reserved and not committed never is.
* A range has one owner: a free range, a write lease, or one readable object.
* An expired write lease publishes nothing, and its ranges stay quarantined until COMMIT, ABORT or the owner's end,
since a stopped writer may wake up and write.
* What is pinned is neither evicted nor dropped. Pins end with their lease; a lease says whether it held throughout.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvframework.api import EvictionPolicy, PackedKey
from kvframework.errors import LeaseUnknown, RequestError
from kvframework.storage.allocator import RangeAllocator, rounded

INTERNAL_OWNER = 0
MAX_LEASES_PER_OWNER = 4096
NO_DEADLINE = math.inf


@dataclass(slots=True)
class StoredObject:
    """A readable object."""

    key: PackedKey
    offset: int
    length: int
    pins: int = 0


@dataclass(slots=True)
class WriteLease:
    """Ranges that one writer may fill, then commit."""

    id: str
    owner: int
    request_id: str
    deadline: float
    items: list[tuple[PackedKey, int, int]]
    quarantined: bool = False


@dataclass(slots=True)
class PinLease:
    """Objects that may not leave: under a LOOKUP's ticket, or while a RETRIEVE reads them."""

    id: str
    owner: int
    request_id: str
    deadline: float
    objects: list[StoredObject]
    held: bool = True


@dataclass(slots=True)
class Reservation:
    """What `reserve` did. `placed` holds (index of the item, offset); the counts cover the other items."""

    lease: WriteLease | None
    placed: list[tuple[int, int]] = field(default_factory=list)
    present: int = 0
    in_flight: int = 0
    dropped: int = 0


L = TypeVar("L", WriteLease, PinLease)


class ObjectTable:
    """See the module."""

    def __init__(self, allocator: RangeAllocator, policy: EvictionPolicy) -> None:
        self.allocator = allocator
        self.used_bytes = 0
        self.quarantined_bytes = 0
        self.pins = 0
        self.evictions = 0
        self._policy = policy
        self._objects: dict[PackedKey, StoredObject] = {}
        self._writing: dict[PackedKey, WriteLease] = {}
        self._write_leases: dict[str, WriteLease] = {}
        self._pin_leases: dict[str, PinLease] = {}
        self._leases_of: dict[int, set[str]] = {}
        self._boot = secrets.token_hex(4)
        self._count = itertools.count(1)

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: PackedKey) -> bool:
        return key in self._objects

    @property
    def write_leases(self) -> int:
        return len(self._write_leases)

    @property
    def pin_leases(self) -> int:
        return len(self._pin_leases)

    def any_writing(self, keys: Iterable[PackedKey]) -> bool:
        return any(key in self._writing for key in keys)

    # writing

    def reserve(
        self, items: Sequence[tuple[PackedKey, int]], *, owner: int, request_id: str, deadline: float
    ) -> Reservation:
        """Places each (key, bytes) that is neither present nor being written, evicting where it must.

        Items come in prefix order: after the first that cannot be placed the rest is dropped, since without it they
        could not be a hit. Raises `RequestError` if the owner holds too many leases.
        """
        self._check_lease_count(owner)
        lease = WriteLease(self._new_id(), owner, request_id, deadline, [])
        self._remember(lease, self._write_leases)
        result = Reservation(lease)
        # What this very request will need is the last that it may push out.
        present = [self._objects[key] for key, _ in items if key in self._objects]
        self._touch(present)
        self._pin(present)
        try:
            for index, (key, nbytes) in enumerate(items):
                if key in self._objects:
                    result.present += 1
                elif key in self._writing:
                    result.in_flight += 1
                else:
                    offset = self._place(nbytes)
                    if offset is None:
                        self._count_unplaced(items[index:], result)
                        break
                    lease.items.append((key, offset, nbytes))
                    result.placed.append((index, offset))
                    self._writing[key] = lease
        except BaseException:
            # A policy that raises must not leave keys behind that nobody will ever commit.
            self._drop_write_lease(lease)
            raise
        finally:
            self._unpin(present)
        if not lease.items:
            self._forget(lease)
            result.lease = None
        return result

    def lease_size(self, lease_id: str, *, owner: int) -> int:
        """The number of objects that a write lease holds. Raises `LeaseUnknown`."""
        return len(self._own_write_lease(lease_id, owner).items)

    def commit(self, lease_id: str, *, owner: int, now: float) -> list[StoredObject]:
        """Publishes a lease's objects and ends it; an expired one frees its ranges and publishes nothing: []."""
        lease = self._own_write_lease(lease_id, owner)
        if now >= lease.deadline:
            self._quarantine(lease)
        if lease.quarantined:
            self._drop_write_lease(lease)
            return []
        self._forget(lease)
        objects = []
        for key, offset, nbytes in lease.items:
            del self._writing[key]
            self._objects[key] = stored = StoredObject(key, offset, nbytes)
            objects.append(stored)
        # Last chunk first, so that a policy that goes by recency lets go of a prefix from its end.
        for stored in reversed(objects):
            self._policy.on_insert(stored.key, stored.length)
        return objects

    def abort(self, lease_id: str, *, owner: int) -> int:
        """Frees a lease's ranges unpublished; the number of objects."""
        lease = self._own_write_lease(lease_id, owner)
        self._drop_write_lease(lease)
        return len(lease.items)

    # reading

    def pin(
        self, keys: Sequence[PackedKey], *, owner: int, request_id: str, deadline: float, touch: bool = True
    ) -> PinLease | None:
        """Pins all of `keys`, or none and returns None if one is missing. Counts as a use of each if `touch`."""
        self._check_lease_count(owner)
        objects = [self._objects.get(key) for key in keys]
        found = [stored for stored in objects if stored is not None]
        if len(found) != len(objects):
            return None
        if touch:
            self._touch(found)
        self._pin(found)
        lease = PinLease(self._new_id(), owner, request_id, deadline, found)
        self._remember(lease, self._pin_leases)
        return lease

    def unpin(self, lease_id: str, *, owner: int, now: float) -> PinLease:
        """Ends a pin lease; its `held` says whether the pins held until now."""
        lease = self._pin_leases.get(lease_id)
        if lease is None or lease.owner != owner:
            raise _unknown(lease_id)
        if now >= lease.deadline:
            self._lapse(lease)
        self._drop_pin_lease(lease)
        return lease

    # time and ends

    def expire(self, now: float) -> None:
        """Quarantines write leases and lapses pin leases whose deadline has passed."""
        for write in self._write_leases.values():
            if not write.quarantined and now >= write.deadline:
                self._quarantine(write)
        for pins in self._pin_leases.values():
            if pins.held and now >= pins.deadline:
                self._lapse(pins)

    def end_owner(self, owner: int, request_id: str | None = None) -> int:
        """Ends all leases of an owner (of one request if given); the number ended."""
        ids = [
            lease_id
            for lease_id in self._leases_of.get(owner, ())
            if request_id is None or self._lease(lease_id).request_id == request_id
        ]
        for lease_id in ids:
            lease = self._lease(lease_id)
            if isinstance(lease, WriteLease):
                self._drop_write_lease(lease)
            else:
                self._drop_pin_lease(lease)
        return len(ids)

    def clear(self) -> tuple[list[StoredObject], int]:
        """Drops every object that is not pinned: (dropped, number still in use)."""
        dropped = [stored for stored in self._objects.values() if not stored.pins]
        for stored in dropped:
            self._remove(stored)
        return dropped, len(self._objects)

    def drop(self, key: PackedKey) -> bool:
        """Drops one object unless it is pinned or absent."""
        stored = self._objects.get(key)
        if stored is None or stored.pins:
            return False
        self._remove(stored)
        return True

    def evict_down_to(self, used_bytes: int) -> int:
        """Evicts what the policy offers until at most `used_bytes` are used; bytes evicted."""
        before = self.used_bytes
        if before > used_bytes:
            self._evict(before - used_bytes)
        return before - self.used_bytes

    # inside

    def _place(self, nbytes: int) -> int | None:
        offset = self.allocator.allocate(nbytes)
        while offset is None:
            if rounded(nbytes) > self.allocator.limit or not self._evict(rounded(nbytes)):
                return None
            offset = self.allocator.allocate(nbytes)
        self.used_bytes += rounded(nbytes)
        return offset

    def _evict(self, nbytes: int) -> bool:
        victims: list[StoredObject] = []
        freed = 0
        for key in self._policy.victims():
            stored = self._objects.get(key)
            if stored is not None and not stored.pins:
                victims.append(stored)
                freed += rounded(stored.length)
                if freed >= nbytes:
                    break
        for stored in victims:
            self._remove(stored)
            self.evictions += 1
        return bool(victims)

    def _remove(self, stored: StoredObject) -> None:
        del self._objects[stored.key]
        self._free(stored.offset, stored.length)
        self._policy.on_remove(stored.key)

    def _free(self, offset: int, nbytes: int) -> None:
        self.allocator.free(offset, nbytes)
        self.used_bytes -= rounded(nbytes)

    def _count_unplaced(self, items: Sequence[tuple[PackedKey, int]], result: Reservation) -> None:
        for key, _ in items:
            if key in self._objects:
                result.present += 1
            elif key in self._writing:
                result.in_flight += 1
            else:
                result.dropped += 1

    def _touch(self, objects: Sequence[StoredObject]) -> None:
        for stored in reversed(objects):
            self._policy.on_access(stored.key)

    def _pin(self, objects: Iterable[StoredObject]) -> None:
        for stored in objects:
            stored.pins += 1
            self.pins += 1

    def _unpin(self, objects: Iterable[StoredObject]) -> None:
        for stored in objects:
            stored.pins -= 1
            self.pins -= 1

    def _quarantine(self, lease: WriteLease) -> None:
        if not lease.quarantined:
            lease.quarantined = True
            for key, _, nbytes in lease.items:
                del self._writing[key]
                self.quarantined_bytes += rounded(nbytes)

    def _lapse(self, lease: PinLease) -> None:
        if lease.held:
            lease.held = False
            self._unpin(lease.objects)
            lease.objects = []

    def _drop_write_lease(self, lease: WriteLease) -> None:
        self._forget(lease)
        for key, offset, nbytes in lease.items:
            if lease.quarantined:
                self.quarantined_bytes -= rounded(nbytes)
            else:
                del self._writing[key]
            self._free(offset, nbytes)

    def _drop_pin_lease(self, lease: PinLease) -> None:
        self._forget(lease)
        if lease.held:
            self._unpin(lease.objects)

    def _remember(self, lease: L, leases: dict[str, L]) -> None:
        leases[lease.id] = lease
        self._leases_of.setdefault(lease.owner, set()).add(lease.id)

    def _forget(self, lease: WriteLease | PinLease) -> None:
        leases: dict[str, WriteLease] | dict[str, PinLease]
        leases = self._write_leases if isinstance(lease, WriteLease) else self._pin_leases
        del leases[lease.id]
        owned = self._leases_of[lease.owner]
        owned.discard(lease.id)
        if not owned:
            del self._leases_of[lease.owner]

    def _lease(self, lease_id: str) -> WriteLease | PinLease:
        return self._write_leases.get(lease_id) or self._pin_leases[lease_id]

    def _own_write_lease(self, lease_id: str, owner: int) -> WriteLease:
        lease = self._write_leases.get(lease_id)
        if lease is None or lease.owner != owner:
            raise _unknown(lease_id)
        return lease

    def _check_lease_count(self, owner: int) -> None:
        if owner != INTERNAL_OWNER and len(self._leases_of.get(owner, ())) >= MAX_LEASES_PER_OWNER:
            raise RequestError(
                f"the client holds {MAX_LEASES_PER_OWNER} leases and tickets",
                available=f"at most {MAX_LEASES_PER_OWNER} at once",
                hint="commit, abort or free them, or send END_SESSION",
            )

    def _new_id(self) -> str:
        # Unique over restarts too, so that a lease of an earlier boot is never taken for one of this.
        return f"{self._boot}-{next(self._count):x}"


def _unknown(lease_id: str) -> LeaseUnknown:
    return LeaseUnknown(
        f"there is no lease {lease_id!r} of this client", hint="it ended, or the server was restarted: prepare again"
    )
