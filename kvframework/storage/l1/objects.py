"""The object table: the place of each object in the arena, its writer, and its pins.

A pure state machine: no I/O, no clock of its own (`now` is passed in, seconds on any monotonic clock), no lock (the
lock of `kvframework.storage.table` serialises calls). Invariants, tested against a model:

* Only committed objects are readable; reserved ranges never are.
* A range has one owner: a free range, a write lease, or one readable object.
* An expired or cancelled write lease publishes nothing, and its ranges stay quarantined until COMMIT, ABORT or the
owner's end, since a stopped writer may wake up and write.
* Pinned objects are neither evicted nor dropped. Pins end with their lease; a lease says whether it held throughout.

An object's last use has the latest time that a call has passed: that of the last tick, or better.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvframework.api.eviction import EvictionPolicy, PackedKey, RequestFacts, Use
from kvframework.storage.l1.entries import NO_CLIENT, Accounts, ObjectRows, RangeAllocator, StoredObject, rounded
from kvframework.storage.l1.eviction import (
    SALT,
    Part,
    PendingRemovals,
    Tenant,
    Tenants,
    Uses,
    VictimWalk,
    VictimWalks,
    choose_window,
    parts_of,
)
from kvframework.storage.l1.eviction_statistics import LAST_EVICTION, Cause
from kvframework.storage.l1.journal import Journal
from kvframework.storage.l1.journal_format import Found, FoundReservation
from kvframework.storage.l1.leases import (
    INTERNAL_OWNER,
    NO_DEADLINE,
    NO_PROMPT,
    LeaseBook,
    PinLease,
    PinShares,
    PromptPart,
    Reservation,
    WriteLease,
)

# How long after a pin lease lapsed its owner may still end it and learn that it did not hold.
REMEMBER_LAPSED_S = 600.0
# Objects that one `expire` unpins, up to one lease more: about a millisecond.
UNPIN_AT_ONCE = 1 << 16


class ObjectTable:
    """The table of objects; see the module. `on_remove` receives each object that leaves, the cause, and the key of the
    object that it makes place for, None for none. `was_done` says of an object that is not here whether it left since
    no one was to ask for it again. `policy` orders the objects of no named tenant; `journal` records what the table
    holds, for the next server. `prices` are the seconds to compute a token again and to load a byte, for the policy."""

    def __init__(
        self,
        allocator: RangeAllocator,
        policy: EvictionPolicy,
        on_remove: Callable[[StoredObject, Cause, PackedKey | None], None] = lambda *_: None,
        tenants: Sequence[Tenant] = (),
        journal: Journal | None = None,
        prices: Callable[[], tuple[float | None, float | None]] = lambda: (None, None),
        was_done: Callable[[PackedKey], bool] = lambda _key: False,
    ) -> None:
        self._was_done = was_done
        self._prices = prices
        self.allocator = allocator
        self._journal = journal
        # Ranges that clients of an earlier server may still fill, by writer.
        self._foreign: dict[int, list[FoundReservation]] = {}
        self._on_remove = on_remove
        self._now = 0.0
        self.used_bytes = 0
        self.quarantined_bytes = 0
        self.pins = 0
        self.evictions = 0
        # Leases ever quarantined, and ever lapsed.
        self.quarantines = 0
        self.lapses = 0
        self.tenants = Tenants(policy, tenants)
        self.accounts = Accounts()
        self._objects = ObjectRows()
        # Return the objects of a row by their digests.
        self.row = self._objects.row
        # Return the rows that have an object of a digest.
        self.prefixes_with = self._objects.prefixes_with
        self._writing: dict[PackedKey, WriteLease] = {}
        self._leases = LeaseBook()
        self.shares = PinShares()
        # The session that a STORE counts for, until it has said that it needs room.
        self._needing = 0
        # Pins of the server itself, see `hold`.
        self._held: dict[str, PinLease] = {}
        self._numbers = itertools.count(1)
        self._uses = Uses(self.tenants, self._objects)
        self._pending_removals = PendingRemovals(self.tenants)
        # The victims of the STORE that is being placed; no free range has as many bytes as `_full`.
        self._walks = VictimWalks(self.tenants, self._objects)
        # That of L1, if there is no rule.
        self._walk: VictimWalk | None = None
        self._full: float = math.inf
        # Reports some of the waiting uses to the policy.
        self.report_uses = self._uses.report_some

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: PackedKey) -> bool:
        return key in self._objects

    @property
    def write_leases(self) -> int:
        return len(self._leases.writes)

    @property
    def pin_leases(self) -> int:
        return len(self._leases.pins) + len(self._held)

    def any_writing(self, keys: Iterable[PackedKey]) -> bool:
        return any(key in self._writing for key in keys)

    def status(self) -> dict[str, object]:
        return {
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
        }

    # writing

    def reserve(
        self,
        items: Sequence[tuple[PackedKey, int]],
        *,
        owner: int,
        request_id: str,
        deadline: float,
        most_bytes: int | None = None,
        client: int = NO_CLIENT,
        payer: int = NO_CLIENT,
        use: Use = "store",
        prompt: PromptPart = NO_PROMPT,
    ) -> Reservation:
        """Place each (key, bytes) that is neither present nor being written, evicting where necessary.

        Items are of one request, in prefix order: after the first that cannot be placed the rest is dropped, since
        without it they could not be a hit. Present objects are pinned until the lease ends. `most_bytes` bounds the
        owner's reserved bytes, earlier reservations included; `client` is the session whose account has them, `payer`
        the one whose share of L1 they count in, without one `client`; `use` and `prompt` are for the policy, which may
        refuse the last ones. Raises `RequestError` if the owner holds too many leases.
        """
        self._forget_lapsed(owner)
        space = math.inf if most_bytes is None else most_bytes - self._reserved_bytes(owner)
        lease = self._leases.open_write(owner, request_id, deadline)
        lease.use, lease.prompt = use, prompt
        self._needing = lease.payer = self.shares.payer(payer or client)
        tenant = 0
        if items:
            first = items[0][0]
            tenant = lease.tenant = self.tenants.of(first)
            lease.account = self.accounts.of(client, first, tenant)
        result = Reservation(lease)
        # Objects that this request needs must not be evicted by itself or by others until it is stored.
        here = self._objects.find([key for key, _ in items])
        lease.present = [stored for stored in here if stored is not None]
        if lease.present:
            self._pin(lease.present, lease.payer)
        if self.shares.is_bound(lease.payer, self._now):
            space = min(space, self.shares.space_left(lease.payer))
        if prompt.retain and lease.present:
            lease.present_chunks = prompt.of([index for index, stored in enumerate(here) if stored is not None])
        writing, of, length = self._writing, -1, 0
        try:
            end = len(items)
            if tenant in self.tenants.refusing:
                end = self._admitted(items, lease)
            for index, (key, nbytes) in enumerate(items):
                if here[index] is not None:
                    result.present += 1
                elif key in writing:
                    result.in_flight += 1
                else:
                    if nbytes != of:
                        of, length = nbytes, rounded(nbytes)
                    offset = self._place(length, key, tenant) if length <= space and index < end else None
                    if offset is None:
                        result.stopped_at = index
                        result.refused = index >= end
                        result.over_share = length > min(space, self.tenants.space_left(tenant, self.allocator.limit))
                        self._count_unplaced(items[index:], result)
                        break
                    space -= length
                    lease.nbytes += length
                    lease.items.append((key, offset, nbytes))
                    result.placed.append((index, offset))
                    writing[key] = lease
        except BaseException:
            # A policy that raises must not leave keys that no writer will ever commit.
            lease.nbytes = 0
            self._drop_write_lease(lease)
            raise
        finally:
            self._walks.end()
            self._walk, self._full = None, math.inf
            self._pending_removals.report()
        self.shares.add(lease.payer, lease.nbytes)
        lease.chunks = prompt.of([index for index, _ in result.placed])
        if lease.items and self._journal is not None:
            lease.slots = self._journal.reserve(lease.items, owner=owner, tenant=tenant)
        if not lease.items:
            result.lease = None
            self._leases.close(lease)
            self._used(
                self._release_present(lease), use, request_id, tenant, prompt._replace(chunks=lease.present_chunks)
            )
        return result

    def lease_size(self, lease_id: str, *, owner: int) -> int:
        """Return the number of objects of a write lease. Raises `LeaseUnknown`."""
        return len(self._leases.write(lease_id, owner).items)

    def commit(self, lease_id: str, *, owner: int, now: float) -> list[StoredObject]:
        """Publish a lease's objects and end it; an expired lease frees its ranges and publishes nothing: []."""
        self._now = now
        lease = self._leases.write(lease_id, owner)
        if now >= lease.deadline:
            self._quarantine(lease)
        if lease.quarantined:
            self._drop_write_lease(lease)
            return []
        self._leases.close(lease)
        self.shares.add(lease.payer, -lease.nbytes)
        objects = []
        account = lease.account.into or lease.account
        tenant, writing = lease.tenant, self._writing
        for key, offset, nbytes in lease.items:
            del writing[key]
            objects.append(StoredObject(key, offset, nbytes, 0, now, tenant, account))
        self._objects.add_all(objects)
        if self._journal is not None:
            for stored, slot in zip(objects, lease.slots, strict=True):
                stored.slot = slot
            self._journal.commit(lease.slots, now)
        of, length, total = -1, 0, 0
        for _, _, nbytes in lease.items:
            if nbytes != of:
                of, length = nbytes, rounded(nbytes)
            total += length
        account.added(len(objects), total)
        present = self._release_present(lease)
        facts = self._facts(lease.use, lease.request_id, lease.tenant, lease.prompt.chunk_tokens)
        if lease.prompt.retain:
            self._inserted_hinted(objects, lease, facts)
        else:
            self.tenants.inserted(lease.tenant, objects, lease.chunks, facts)
        if present:
            found = lease.prompt._replace(chunks=lease.present_chunks)
            self._used(present, lease.use, lease.request_id, lease.tenant, found)
        return objects

    def abort(self, lease_id: str, *, owner: int) -> int:
        """Free a lease's ranges unpublished; return the number of objects."""
        lease = self._leases.write(lease_id, owner)
        self._drop_write_lease(lease)
        return len(lease.items)

    # reading

    def find(self, keys: Sequence[PackedKey]) -> list[StoredObject] | None:
        """Return the objects of all `keys`, None if one is missing."""
        found = [stored for stored in map(self._objects.get, keys) if stored is not None]
        return found if len(found) == len(keys) else None

    def which(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return which of `keys` are readable."""
        return self._objects.which(keys)

    def use(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return which of `keys` are readable, given in the order of a prompt; counts as a use of each."""
        found = [self._objects.get(key) for key in keys]
        self._used([stored for stored in found if stored is not None], "store", "", 0)
        return [stored is not None for stored in found]

    def pin(
        self, keys: Sequence[PackedKey], *, owner: int, request_id: str, deadline: float, use: Use | None = "lookup"
    ) -> PinLease | None:
        """Pin all of `keys`; pins none and returns None if one is missing. Counts as a `use` of each, unless that is
        None; many uses are reported to the policy later (`report_uses`), while most objects are pinned anyway."""
        found = self.find(keys)
        if found is None:
            return None
        return self.pin_objects(found, owner=owner, request_id=request_id, deadline=deadline, use=use)

    def pin_objects(
        self,
        objects: list[StoredObject],
        *,
        owner: int,
        request_id: str,
        deadline: float,
        use: Use | None = "lookup",
        prompt: PromptPart = NO_PROMPT,
        asked_by: int | None = None,
        hit: bool = False,
    ) -> PinLease:
        """Pin objects of this table, in the order of a prompt; the lease owns the list. `prompt` has their places if
        the request says anything of their future. `asked_by` is the session that the pins count for, None: the owner.
        A `hit` may lapse when others need room. Raises `RequestError` if that session holds too many leases or
        pins."""
        who = owner if asked_by is None else asked_by
        self._forget_lapsed(who)
        payer = self.shares.payer(who)
        lease = self._leases.open_pin(owner, request_id, deadline, objects, asked_by=who, payer=payer, hit=hit)
        self._pin(objects, payer)
        if use is not None:
            self._used(objects, use, request_id, objects[0].tenant if objects else 0, prompt)
        return lease

    def reads(self, session: int, request_id: str, objects: Sequence[StoredObject]) -> None:
        """A session is about to load objects: if another one alone pins them, by a hit of the same request, it is the
        scheduler of this worker, and what the worker pins counts for it from now on."""
        shares = self.shares
        payer = objects[0].payer if objects else 0
        if payer > 0 and shares.payer(session) == session != payer and self._leases.has_hit(payer, request_id):
            shares.work_for(session, payer)

    def pinned(self, lease_id: str, *, owner: int, now: float) -> list[StoredObject] | None:
        """Return the objects under a pin lease, None if it has lapsed."""
        lease = self._own_pin_lease(lease_id, owner, now)
        return lease.objects if lease.held else None

    def unpin(
        self, lease_id: str, *, owner: int, now: float, use: Use | None = None, prompt: PromptPart = NO_PROMPT
    ) -> PinLease:
        """End a pin lease; its `held` says whether the pins held until now. With a `use`, which it turns out to have
        been, that of each object, if they did; `prompt` as for `pin_objects`."""
        lease = self._own_pin_lease(lease_id, owner, now)
        if use is not None and lease.objects:
            self._used(lease.objects, use, lease.request_id, lease.objects[0].tenant, prompt)
        self._drop_pin_lease(lease)
        return lease

    def hold(self, key: PackedKey) -> PinLease | None:
        """Pin an object for the server itself, until `release`; None if it is missing. Counts as no use. Such pins are
        many and short, and in no lease book."""
        stored = self._objects.get(key)
        if stored is None:
            return None
        lease = PinLease(f"hold-{next(self._numbers):x}", INTERNAL_OWNER, "", NO_DEADLINE, [stored])
        self._held[lease.id] = lease
        stored.pins += 1
        stored.holds += 1
        self.pins += 1
        return lease

    def release(self, leases: Sequence[PinLease]) -> None:
        """End pins of the server itself: of `hold`, and leases of `INTERNAL_OWNER`. Raises `LeaseUnknown` for one that
        has ended."""
        for lease in leases:
            if self._held.pop(lease.id, None) is not None:
                lease.objects[0].pins -= 1
                lease.objects[0].holds -= 1
                self.pins -= 1
            else:
                self._drop_pin_lease(self._leases.pin(lease.id, INTERNAL_OWNER))

    def keep_within_share(self, lease: PinLease) -> bool:
        """Return whether a lease may stay that cannot lapse; if not, it ends. While others need space, the session's
        oldest hits lapse for it first."""
        shares, payer = self.shares, lease.payer
        if payer not in shares.over or not shares.is_bound(payer, self._now):
            return True
        self._end_hits(payer)
        if payer not in shares.over:
            return True
        self._drop_pin_lease(lease)
        shares.cut(payer)
        return False

    # time and ends

    def expire(self, now: float) -> None:
        """Quarantine write leases and lapse pin leases whose deadline has passed; forget those that lapsed long ago.

        Unpins about `UNPIN_AT_ONCE` objects at most; the remaining leases lapse in the next calls, or on access.
        """
        self._now = now
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
        """End all leases of an owner that has ended, and so writes and reads no more; return their number."""
        self.accounts.end(owner)
        self.shares.end_session(owner)
        leases = self._leases.of(owner)
        for lease in leases:
            if isinstance(lease, WriteLease):
                self._drop_write_lease(lease)
            else:
                self._drop_pin_lease(lease)
        return len(leases)

    def cancel(self, owner: int, request_id: str | None = None) -> int:
        """End the claims of a live owner (of one request if given); return their number.

        Its pins end. Its write leases will not be published, but the owner may still be writing: the ranges are
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
        """Return all readable objects as of now, in no particular order."""
        return list(self._objects)

    def drop_unused(self, objects: Iterable[StoredObject]) -> tuple[list[StoredObject], int]:
        """Drop those of `objects` that are still in the table and not pinned: (dropped, number of pinned ones)."""
        here = [stored for stored in objects if self._objects.get(stored.key) is stored]
        dropped = [stored for stored in here if not stored.pins]
        for stored in dropped:
            self._remove(stored, Cause.CLEARED)
        self._pending_removals.report()
        return dropped, len(here) - len(dropped)

    def drop(self, key: PackedKey, cause: Cause = Cause.CLEARED) -> bool:
        """Drop one object unless it is pinned or absent; return whether it was dropped."""
        return bool(self._drop([key], cause))

    def candidates(self, used_bytes: int) -> list[PackedKey]:
        """Return the keys that the policy would evict to get down to `used_bytes`, without pinned objects and what is
        guaranteed to tenants."""
        keys: list[PackedKey] = []
        excess = self.used_bytes - used_bytes
        tenants = self.tenants
        leaving = tenants.victims(lambda of: tenants.evictable(of, self._objects), tenants.spare(), all_leave=True)
        for stored in leaving if excess > 0 else ():
            keys.append(stored.key)
            excess -= rounded(stored.length)
            if excess <= 0:
                break
        return keys

    def evict(self, keys: Iterable[PackedKey], cause: Cause = Cause.WATERMARK) -> None:
        """Evict those of `keys` that are not pinned."""
        self.evictions += self._drop(keys, cause)

    def keep_in(self, journal: Journal) -> None:
        """Record what the table holds, and each change from now on."""
        self._journal = journal
        for stored in self._objects:
            slots = journal.reserve([(stored.key, stored.offset, stored.length)], owner=0, tenant=stored.tenant)
            journal.commit(slots, stored.used)
            stored.slot = slots[0]
        for lease in self._leases.writes.values():
            lease.slots = journal.reserve(lease.items, owner=lease.owner, tenant=lease.tenant)

    def sealed(self, checksums: Mapping[PackedKey, int]) -> None:
        """Record the checksums of objects."""
        for key, checksum in checksums.items():
            stored = self._objects.get(key)
            if stored is not None and self._journal is not None:
                self._journal.sealed(stored.slot, checksum)

    # after a restart

    def adopt(self, found: Found, tenants: Sequence[int], *, now: float) -> None:
        """Take over what the journal of an earlier server holds, into an empty table. `tenants` has the number of each
        tenant of that server, from 1. All its reservations are quarantined, until `writer_ended`."""
        number = (0, *tenants)
        self._now = now
        objects: list[StoredObject] = []
        for run in found.slots.runs():
            key, old = run[0].key, run[0].tenant
            tenant = number[old] if old < len(number) else 0
            if tenant:
                self.tenants.learn(key[SALT], tenant)
            account = self.accounts.of(NO_CLIENT, key, tenant)
            made = [
                StoredObject(key, offset, length, 0, used if used < now else now, tenant, account, slot)
                for used, _, slot, key, offset, length, _, _ in run
            ]
            objects += made
            # Those that were used longest ago come first here.
            self.tenants.inserted(tenant, made[::-1], [-1] * len(made), self._facts("recovered", "", tenant))
            lengths = Counter([stored.length for stored in made])
            nbytes = sum(rounded(length) * count for length, count in lengths.items())
            account.objects += len(made)
            account.nbytes += nbytes
            self.tenants.used[tenant] += nbytes
        self._objects.add_all(objects)
        for range_ in found.slots.reservations:
            tenant = number[range_.tenant] if range_.tenant < len(number) else 0
            self._foreign.setdefault(range_.writer, []).append(range_._replace(tenant=tenant))
            nbytes = rounded(range_.length)
            self.tenants.used[tenant] += nbytes
            self.quarantined_bytes += nbytes
        self.used_bytes = sum(self.tenants.used)
        self.allocator.restore(found.slots.gaps, found.slots.end)

    @property
    def earlier_writers(self) -> list[int]:
        """The clients of an earlier server that may still write into a range that they reserved."""
        return list(self._foreign)

    def writer_ended(self, writer: int) -> None:
        """Free the ranges of a client of an earlier server, which writes no more."""
        for range_ in self._foreign.pop(writer, ()):
            if self._journal is not None:
                self._journal.release((range_.slot,))
            self.quarantined_bytes -= rounded(range_.length)
            self._free(range_.offset, range_.length, range_.tenant)

    # inside

    def _reserved_bytes(self, owner: int) -> int:
        writes = [lease for lease in self._leases.of(owner) if isinstance(lease, WriteLease)]
        return sum(rounded(nbytes) for lease in writes for _, _, nbytes in lease.items)

    def _admitted(self, items: Sequence[tuple[PackedKey, int]], lease: WriteLease) -> int:
        """Return the index of the first absent object that the policy refuses, or the number of items."""
        absent = [
            index for index, (key, _) in enumerate(items) if key not in self._writing and self._objects.get(key) is None
        ]
        if not absent:
            return len(items)
        facts = self._facts(lease.use, lease.request_id, lease.tenant, lease.prompt.chunk_tokens)
        keys, sizes = [items[index][0] for index in absent], [items[index][1] for index in absent]
        chunks = lease.prompt.of(absent)
        count = self.tenants.policies[lease.tenant].admits(keys, sizes, chunks, facts)
        return absent[count] if 0 <= count < len(absent) else len(items)

    def _place(self, length: int, key: PackedKey, tenant: int) -> int | None:
        tenants, walk = self.tenants, self._walk
        if walk is None and not tenants.any_named and self.allocator.largest_free < length:
            self._need_room()
            walk, self._full = self._walks.of(0), length
            self._walk = walk
        if walk is not None and length >= self._full:
            # The usual case: one leaves, and the other takes its very place.
            first = walk.next()
            if first is not None and rounded(first.length) == length:
                self.evictions += 1
                self._remove(first, Cause.ROOM, key, length)
                return first.offset
            if first is not None:
                walk.put_back(first)
        over = length - tenants.space_left(tenant, self.allocator.limit)
        if over > 0 and not self._shrink(tenant, over, key):
            return None
        offset = self.allocator.allocate(length) if length < self._full else None
        if offset is None and length <= self.allocator.limit:
            self._need_room()
            offset = self._make_place(length, key, tenant, Cause.ROOM if over <= 0 else Cause.TENANT)
        if offset is not None:
            self.used_bytes += length
            tenants.used[tenant] += length
        return offset

    def _need_room(self) -> None:
        """Let the oldest hits of the sessions above their share lapse, for the STORE of another one."""
        payer, self._needing = self._needing, 0
        if not payer:
            return
        self.shares.need(payer, self._now)
        for other in self.shares.over - {payer}:
            self._end_hits(other)
            # What is unpinned now may have been passed over.
            self._walks.end()

    def _end_hits(self, payer: int) -> None:
        """Let the oldest hits of a session lapse until it holds no more than its share."""
        for lease in self._leases.hits(payer):
            if payer not in self.shares.over:
                return
            self._unpin(self._leases.lapse(lease), payer)
            self.shares.cut(payer)

    def _make_place(self, length: int, key: PackedKey, tenant: int, cause: Cause) -> int | None:
        """Evict for the object `key`; return the offset of its place, allocated."""
        tenants, walks = self.tenants, self._walks
        spare = tenants.spare(tenant) if cause is Cause.ROOM else tenants.own(tenant)
        victims = tenants.victims(walks.looked_at, spare, last=tenant)
        leaving = choose_window(length, victims, self._objects, self.allocator, spare)
        for stored in leaving:
            self._remove(stored, cause, key)
        self.evictions += len(leaving)
        walks.stay()
        offset = self.allocator.allocate(length)
        if spare is None:
            self._walk = walks.of(0)
            self._full = length if self.allocator.largest_free < length else math.inf
        return offset

    def _shrink(self, tenant: int, nbytes: float, key: PackedKey) -> bool:
        """Evict `nbytes` of a tenant's own objects for the object `key`; nothing if there are not as many."""
        leaving = []
        for stored in self.tenants.victims(self._walks.looked_at, self.tenants.own(tenant)):
            leaving.append(stored)
            nbytes -= rounded(stored.length)
            if nbytes <= 0:
                break
        else:
            leaving = []
        for each in leaving:
            self._remove(each, Cause.TENANT, key)
        self.evictions += len(leaving)
        self._walks.stay()
        return bool(leaving)

    def _drop(self, keys: Iterable[PackedKey], cause: Cause) -> int:
        """Drop those of `keys` that are here and not pinned; return their number."""
        dropped = 0
        for key in keys:
            stored = self._objects.get(key)
            if stored is not None and not stored.pins:
                self._remove(stored, cause)
                dropped += 1
        self._pending_removals.report()
        return dropped

    def _remove(self, stored: StoredObject, cause: Cause, by: PackedKey | None = None, taken: int = 0) -> None:
        """Remove an object, and free its range unless another one of its tenant takes all `taken` bytes of it;
        `PendingRemovals.report` follows."""
        if stored.used < 0.0 and cause <= LAST_EVICTION:
            cause = Cause.HINTED
        self._objects.remove(stored)
        if self._journal is not None:
            self._journal.release((stored.slot,))
        length = taken or rounded(stored.length)
        if not taken:
            self.allocator.free(stored.offset, length)
            self.used_bytes -= length
            self.tenants.used[stored.tenant] -= length
        account = stored.account.into or stored.account
        account.objects -= 1
        account.nbytes -= length
        account.evicted += cause <= LAST_EVICTION
        self._pending_removals.add(stored, cause)
        self._on_remove(stored, cause, by)

    def _free(self, offset: int, nbytes: int, tenant: int) -> None:
        """Free a reserved range."""
        length = rounded(nbytes)
        self.allocator.free(offset, length)
        self.used_bytes -= length
        self.tenants.used[tenant] -= length

    def _count_unplaced(self, items: Sequence[tuple[PackedKey, int]], result: Reservation) -> None:
        for key, _ in items:
            if key in self._objects:
                result.present += 1
            elif key in self._writing:
                result.in_flight += 1
            else:
                result.dropped += 1

    def _facts(self, use: Use, request_id: str, tenant: int, chunk_tokens: int = 0) -> RequestFacts:
        compute_s, load_s = self._prices()
        return RequestFacts(
            use=use,
            at=self._now,
            request_id=request_id,
            tenant=self.tenants.names[tenant],
            chunk_tokens=chunk_tokens,
            compute_s=compute_s,
            load_s=load_s,
            held=self.tenants.used[tenant],
        )

    def _used(
        self, objects: list[StoredObject], use: Use, request_id: str, tenant: int, prompt: PromptPart = NO_PROMPT
    ) -> None:
        if not objects:
            return
        if prompt.retain:
            self._used_hinted(objects, self._facts(use, request_id, tenant), prompt)
            return
        now = self._now
        for stored in objects:
            stored.used = now
        self._uses.add(objects, self._facts(use, request_id, tenant))
        if self._journal is not None:
            self._journal.used(objects)

    def _used_hinted(self, objects: list[StoredObject], facts: RequestFacts, prompt: PromptPart) -> None:
        chunks = prompt.chunks or [-1] * len(objects)
        for part in parts_of(chunks, prompt.chunk_tokens, prompt.retain, [False] * len(objects)):
            some = objects[part.objects]
            self._mark(some, part)
            self._uses.add(some, part.added_to(facts))
        if self._journal is not None:
            self._journal.used(objects)

    def _inserted_hinted(self, objects: list[StoredObject], lease: WriteLease, facts: RequestFacts) -> None:
        prompt = lease.prompt
        is_first = [not self._was_done(stored.key) for stored in objects]
        for part in parts_of(lease.chunks, prompt.chunk_tokens, prompt.retain, is_first):
            some = objects[part.objects]
            self._mark(some, part)
            self.tenants.inserted(lease.tenant, some, lease.chunks[part.objects], part.added_to(facts))
        if self._journal is not None:
            self._journal.used(objects)

    def _mark(self, objects: Sequence[StoredObject], part: Part) -> None:
        used = -self._now if part.hint == "done" else self._now
        for stored in objects:
            stored.used = used

    def _pin(self, objects: Sequence[StoredObject], payer: int) -> None:
        self.shares.pin(objects, payer)
        self.pins += len(objects)

    def _unpin(self, objects: Sequence[StoredObject], payer: int) -> None:
        self.shares.unpin(objects, payer)
        self.pins -= len(objects)

    def _quarantine(self, lease: WriteLease, *, late: bool = True) -> None:
        """`late` means that the deadline has passed; otherwise the writer gave the lease up, which counts as no
        failure."""
        if not lease.quarantined:
            lease.quarantined = True
            self.quarantines += late
            self._release_present(lease)
            for key, _, nbytes in lease.items:
                del self._writing[key]
                self.quarantined_bytes += rounded(nbytes)

    def _lapse(self, lease: PinLease) -> None:
        if lease.held:
            self.lapses += 1
            self._unpin(self._leases.lapse(lease), lease.payer)

    def _release_present(self, lease: WriteLease) -> list[StoredObject]:
        """Unpin the objects that were present before a lease; return them."""
        present, lease.present = lease.present, []
        if present:
            self._unpin(present, lease.payer)
        return present

    def _drop_write_lease(self, lease: WriteLease) -> None:
        self._leases.close(lease)
        self._release_present(lease)
        self.shares.add(lease.payer, -lease.nbytes)
        if self._journal is not None:
            self._journal.release(lease.slots)
        for key, offset, nbytes in lease.items:
            if lease.quarantined:
                self.quarantined_bytes -= rounded(nbytes)
            else:
                del self._writing[key]
            self._free(offset, nbytes, lease.tenant)

    def _drop_pin_lease(self, lease: PinLease) -> None:
        self._leases.close(lease)
        if lease.held:
            self._unpin(lease.objects, lease.payer)

    def _own_pin_lease(self, lease_id: str, owner: int, now: float) -> PinLease:
        lease = self._leases.pin(lease_id, owner)
        if now >= lease.deadline:
            self._lapse(lease)
        return lease

    def _forget_lapsed(self, session: int) -> None:
        """Forget the lapsed pin leases that a session asked for before they keep it from opening new ones."""
        if self._leases.is_full(session):
            for lease in self._leases.asked(session):
                if isinstance(lease, PinLease) and not lease.held:
                    self._drop_pin_lease(lease)
