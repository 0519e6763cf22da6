"""Owns the object table: which object lies where in the arena, who writes it, who has it pinned.

A pure state machine: no I/O, no clock of its own (`now` is passed in, seconds on any monotonic clock), no lock (the
storage manager serialises calls). Invariants, tested against a model:

* Only committed objects are readable; what was reserved and not committed never is.
* A range has one owner: a free range, a write lease, or one readable object.
* An expired or withdrawn write lease publishes nothing, and its ranges stay quarantined until COMMIT, ABORT or the
owner's end, since a stopped writer may wake up and write.
* What is pinned is neither evicted nor dropped. Pins end with their lease; a lease says whether it held throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvframework.api import EvictionPolicy, PackedKey
from kvframework.storage.l1.allocator import RangeAllocator, rounded
from kvframework.storage.l1.leases import LeaseBook, PinLease, StoredObject, WriteLease
from kvframework.storage.l1.rows import ObjectRows
from kvframework.storage.l1.uses import Uses
from kvframework.storage.l1.window import choose_window

# How long the owner of a lapsed pin lease may still ask for its end, and be told that it did not hold.
REMEMBER_LAPSED_S = 600.0
# Objects that one `expire` unpins, give or take a lease: about a millisecond.
UNPIN_AT_ONCE = 1 << 16


@dataclass(slots=True)
class Reservation:
    """What `reserve` did. `placed` holds (index of the item, offset); the counts cover the other items."""

    lease: WriteLease | None
    placed: list[tuple[int, int]] = field(default_factory=list)
    present: int = 0
    in_flight: int = 0
    dropped: int = 0


class ObjectTable:
    """See the module."""

    def __init__(
        self,
        allocator: RangeAllocator,
        policy: EvictionPolicy,
        on_remove: Callable[[PackedKey], None] = lambda _key: None,
    ) -> None:
        self.allocator = allocator
        self._on_remove = on_remove
        self.used_bytes = 0
        self.quarantined_bytes = 0
        self.pins = 0
        self.evictions = 0
        # Leases ever quarantined, and ever lapsed.
        self.quarantines = 0
        self.lapses = 0
        self._policy = policy
        self._objects = ObjectRows()
        # The objects of a row by their digests.
        self.row = self._objects.row
        self._writing: dict[PackedKey, WriteLease] = {}
        self._leases = LeaseBook()
        self._uses = Uses(policy, self._objects)
        # Tells the policy some of the uses that it has not been told yet.
        self.tell_uses = self._uses.tell_some

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: PackedKey) -> bool:
        return key in self._objects

    @property
    def write_leases(self) -> int:
        return len(self._leases.writes)

    @property
    def pin_leases(self) -> int:
        return len(self._leases.pins)

    def any_writing(self, keys: Iterable[PackedKey]) -> bool:
        return any(key in self._writing for key in keys)

    # writing

    def reserve(
        self,
        items: Sequence[tuple[PackedKey, int]],
        *,
        owner: int,
        request_id: str,
        deadline: float,
        most_bytes: int | None = None,
    ) -> Reservation:
        """Places each (key, bytes) that is neither present nor being written, evicting where it must.

        Items come in prefix order: after the first that cannot be placed the rest is dropped, since without it they
        could not be a hit. What is present is pinned until the lease ends. `most_bytes` bounds what the owner has
        reserved at once, with what it reserved before. Raises `RequestError` if the owner holds too many leases.
        """
        self._make_room(owner)
        room = math.inf if most_bytes is None else most_bytes - self._reserved_bytes(owner)
        lease = self._leases.open_write(owner, request_id, deadline)
        result = Reservation(lease)
        # What this very request needs is pushed out neither by itself nor by others, until it is stored.
        here = [self._objects.get(key) for key, _ in items]
        lease.present = [stored for stored in here if stored is not None]
        self._pin(lease.present)
        try:
            for index, (key, nbytes) in enumerate(items):
                if here[index] is not None:
                    result.present += 1
                elif key in self._writing:
                    result.in_flight += 1
                else:
                    length = rounded(nbytes)
                    offset = self._place(length) if length <= room else None
                    if offset is None:
                        self._count_unplaced(items[index:], result)
                        break
                    room -= length
                    lease.items.append((key, offset, nbytes))
                    result.placed.append((index, offset))
                    self._writing[key] = lease
        except BaseException:
            # A policy that raises must not leave keys behind that nobody will ever commit.
            self._drop_write_lease(lease)
            raise
        if not lease.items:
            result.lease = None
            self._leases.close(lease)
            self._uses.add(self._let_go(lease))
        return result

    def lease_size(self, lease_id: str, *, owner: int) -> int:
        """The number of objects that a write lease holds. Raises `LeaseUnknown`."""
        return len(self._leases.write(lease_id, owner).items)

    def commit(self, lease_id: str, *, owner: int, now: float) -> list[StoredObject]:
        """Publishes a lease's objects and ends it; an expired one frees its ranges and publishes nothing: []."""
        lease = self._leases.write(lease_id, owner)
        if now >= lease.deadline:
            self._quarantine(lease)
        if lease.quarantined:
            self._drop_write_lease(lease)
            return []
        self._leases.close(lease)
        objects = []
        for key, offset, nbytes in lease.items:
            del self._writing[key]
            stored = StoredObject(key, offset, nbytes)
            self._objects.add(stored)
            objects.append(stored)
        present = self._let_go(lease)
        # Last chunk first, so that a policy that goes by recency lets go of a prefix from its end.
        for stored in reversed(objects):
            self._policy.on_insert(stored.key, stored.length)
        self._uses.add(present)
        return objects

    def abort(self, lease_id: str, *, owner: int) -> int:
        """Frees a lease's ranges unpublished; the number of objects."""
        lease = self._leases.write(lease_id, owner)
        self._drop_write_lease(lease)
        return len(lease.items)

    # reading

    def find(self, keys: Sequence[PackedKey]) -> list[StoredObject] | None:
        """All of `keys`, None if one is missing."""
        found = [stored for stored in map(self._objects.get, keys) if stored is not None]
        return found if len(found) == len(keys) else None

    def which(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Which of `keys` are readable."""
        return self._objects.which(keys)

    def pin(
        self, keys: Sequence[PackedKey], *, owner: int, request_id: str, deadline: float, touch: bool = True
    ) -> PinLease | None:
        """Pins all of `keys`, or none and returns None if one is missing. Counts as a use of each if `touch`; the
        policy is told of very many by and by (`tell_uses`), while most of them are pinned anyway."""
        found = self.find(keys)
        if found is None:
            return None
        return self.pin_objects(found, owner=owner, request_id=request_id, deadline=deadline, touch=touch)

    def pin_objects(
        self, objects: list[StoredObject], *, owner: int, request_id: str, deadline: float, touch: bool = True
    ) -> PinLease:
        """Pins objects that are here, in the order of a prompt; the lease owns the list. Raises `RequestError` if the
        owner holds too many leases or pins."""
        self._make_room(owner)
        lease = self._leases.open_pin(owner, request_id, deadline, objects)
        self._pin(objects)
        if touch:
            self._uses.add(objects)
        return lease

    def pinned(self, lease_id: str, *, owner: int, now: float) -> list[StoredObject] | None:
        """The objects under a pin lease, None if it has lapsed."""
        lease = self._own_pin_lease(lease_id, owner, now)
        return lease.objects if lease.held else None

    def unpin(self, lease_id: str, *, owner: int, now: float) -> PinLease:
        """Ends a pin lease; its `held` says whether the pins held until now."""
        lease = self._own_pin_lease(lease_id, owner, now)
        self._drop_pin_lease(lease)
        return lease

    # time and ends

    def expire(self, now: float) -> None:
        """Quarantines write leases and lapses pin leases whose deadline has passed; forgets what lapsed long ago.

        Unpins no more than `UNPIN_AT_ONCE` objects; the leases that are left over lapse in the next calls, or when
        they are asked for.
        """
        for write in self._leases.writes.values():
            if now >= write.deadline:
                self._quarantine(write)
        unpinned = 0
        for pins in list(self._leases.pins.values()):
            if now >= pins.deadline and unpinned < UNPIN_AT_ONCE:
                unpinned += len(pins.objects)
                self._lapse(pins)
            if now >= pins.deadline + REMEMBER_LAPSED_S:
                self._drop_pin_lease(pins)

    def end_owner(self, owner: int) -> int:
        """Ends all leases of an owner that is gone: it writes and reads no more. The number ended."""
        leases = self._leases.of(owner)
        for lease in leases:
            if isinstance(lease, WriteLease):
                self._drop_write_lease(lease)
            else:
                self._drop_pin_lease(lease)
        return len(leases)

    def withdraw(self, owner: int, request_id: str | None = None) -> int:
        """Ends what an owner that lives claims (of one request if given); the number ended.

        Its pins end. What it was to write is published no more, but it may still be writing: the ranges are
        quarantined.
        """
        ended = 0
        for lease in self._leases.of(owner, request_id):
            if isinstance(lease, PinLease):
                self._drop_pin_lease(lease)
                ended += 1
            elif not lease.quarantined:
                self._quarantine(lease, late=False)
                ended += 1
        return ended

    def objects(self) -> list[StoredObject]:
        """All readable objects as of now, in no order."""
        return list(self._objects)

    def drop_unused(self, objects: Iterable[StoredObject]) -> tuple[list[StoredObject], int]:
        """Drops those of `objects` that are still here and not pinned: (dropped, number that is pinned)."""
        here = [stored for stored in objects if self._objects.get(stored.key) is stored]
        dropped = [stored for stored in here if not stored.pins]
        for stored in dropped:
            self._remove(stored)
        return dropped, len(here) - len(dropped)

    def drop(self, key: PackedKey) -> bool:
        """Drops one object unless it is pinned or absent."""
        stored = self._objects.get(key)
        if stored is None or stored.pins:
            return False
        self._remove(stored)
        return True

    def candidates(self, used_bytes: int) -> list[PackedKey]:
        """What the policy would evict so that at most `used_bytes` are used: nothing that is pinned."""
        keys: list[PackedKey] = []
        excess = self.used_bytes - used_bytes
        for stored in self._victims() if excess > 0 else ():
            keys.append(stored.key)
            excess -= rounded(stored.length)
            if excess <= 0:
                break
        return keys

    def evict(self, keys: Iterable[PackedKey]) -> None:
        """Evicts those of `keys` that nobody has pinned."""
        self.evictions += sum([self.drop(key) for key in keys])

    # inside

    def _reserved_bytes(self, owner: int) -> int:
        writes = [lease for lease in self._leases.of(owner) if isinstance(lease, WriteLease)]
        return sum(rounded(nbytes) for lease in writes for _, _, nbytes in lease.items)

    def _place(self, length: int) -> int | None:
        offset = self.allocator.allocate(length)
        if offset is None and length <= self.allocator.limit:
            for stored in choose_window(length, self._victims(), self._objects, self.allocator):
                self._remove(stored)
                self.evictions += 1
            offset = self.allocator.allocate(length)
        if offset is not None:
            self.used_bytes += length
        return offset

    def _victims(self) -> Iterator[StoredObject]:
        """What may be evicted, in the policy's order."""
        for key in self._policy.victims():
            stored = self._objects.get(key)
            if stored is not None and not stored.pins:
                yield stored

    def _remove(self, stored: StoredObject) -> None:
        self._objects.remove(stored)
        self._free(stored.offset, stored.length)
        self._policy.on_remove(stored.key)
        self._on_remove(stored.key)

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

    def _pin(self, objects: Sequence[StoredObject]) -> None:
        for stored in objects:
            stored.pins += 1
        self.pins += len(objects)

    def _unpin(self, objects: Sequence[StoredObject]) -> None:
        for stored in objects:
            stored.pins -= 1
        self.pins -= len(objects)

    def _quarantine(self, lease: WriteLease, *, late: bool = True) -> None:
        """`late`: its deadline is over; else its writer gave it up, which is no trouble."""
        if not lease.quarantined:
            lease.quarantined = True
            self.quarantines += late
            self._let_go(lease)
            for key, _, nbytes in lease.items:
                del self._writing[key]
                self.quarantined_bytes += rounded(nbytes)

    def _lapse(self, lease: PinLease) -> None:
        if lease.held:
            self.lapses += 1
            self._unpin(self._leases.lapse(lease))

    def _let_go(self, lease: WriteLease) -> list[StoredObject]:
        """Unpins what was there before a lease; returns it."""
        present, lease.present = lease.present, []
        self._unpin(present)
        return present

    def _drop_write_lease(self, lease: WriteLease) -> None:
        self._leases.close(lease)
        self._let_go(lease)
        for key, offset, nbytes in lease.items:
            if lease.quarantined:
                self.quarantined_bytes -= rounded(nbytes)
            else:
                del self._writing[key]
            self._free(offset, nbytes)

    def _drop_pin_lease(self, lease: PinLease) -> None:
        self._leases.close(lease)
        if lease.held:
            self._unpin(lease.objects)

    def _own_pin_lease(self, lease_id: str, owner: int, now: float) -> PinLease:
        lease = self._leases.pin(lease_id, owner)
        if now >= lease.deadline:
            self._lapse(lease)
        return lease

    def _make_room(self, owner: int) -> None:
        """Forgets an owner's lapsed pin leases before they keep it from getting new ones."""
        if self._leases.is_full(owner):
            for lease in self._leases.of(owner):
                if isinstance(lease, PinLease) and not lease.held:
                    self._drop_pin_lease(lease)
