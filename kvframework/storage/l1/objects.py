"""The object table: the place of each object in the arena, its writer, and its pins.

Pure bookkeeping, no I/O. Thread-safe: public calls take `lock`, for microseconds. Invariants, tested against a model:

* Only committed objects are readable; reserved ranges never are.
* A range has one owner: a free range, a write lease, or one readable object.
* An expired or cancelled write lease publishes nothing, and its ranges stay quarantined until COMMIT, ABORT or the
owner's end, since a stopped writer may wake up and write.
* Pinned objects are neither evicted nor dropped. Pins end with their lease; one that lapses is unknown from then on.

An object's last use has the time of the latest `expire` or `commit`.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from kvframework.api.eviction import EvictionPolicy, PackedKey, RequestFacts, Use
from kvframework.api.keys import Retain
from kvframework.storage.l1.entries import NO_CLIENT, Account, Accounts, StoredObject, rounded
from kvframework.storage.l1.eviction import SALT, Places, Tenant, Tenants, runs_of, with_hint
from kvframework.storage.l1.eviction_statistics import LAST_EVICTION, Cause, FindRow
from kvframework.storage.l1.journal import Found, FoundReservation, Journal
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

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# Objects that one `expire` unpins, up to one lease more: about a millisecond.
UNPIN_AT_ONCE = 1 << 16


def locked(method: F) -> F:
    """Decorator: call the method under the table's lock."""

    @functools.wraps(method)
    def call(self: ObjectTable, /, *arguments: Any, **named: Any) -> Any:
        with self.lock:
            return method(self, *arguments, **named)

    return cast("F", call)


class ObjectTable(Places):
    """The table of objects; see the module. `policy` orders the objects of no named tenant; `nbytes` of the arena are
    free at first; `journal` records what the table holds, for the next server. A `lease_s` of None means no deadline.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        tenants: Sequence[Tenant] = (),
        *,
        nbytes: int = 0,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(Tenants(policy, tenants), nbytes, journal)
        self.lock = threading.RLock()
        self.clock = clock
        # Ranges that clients of an earlier server may still fill, by writer.
        self._foreign: dict[int, list[FoundReservation]] = {}
        self._now = 0.0
        self.quarantined_bytes = 0
        self.pins = 0
        # Leases ever quarantined, and ever lapsed.
        self.quarantines = 0
        self.lapses = 0
        # The seconds in which a token is computed again and a byte is loaded, None if not known; for the policy.
        self.prices: tuple[float | None, float | None] = None, None
        self.accounts = Accounts()
        # Return the objects of a row by their digests; for who holds the lock: the objects are the table's.
        self.row = self._objects.row
        self._writing: dict[PackedKey, WriteLease] = {}
        self._leases = LeaseBook()
        self.shares = PinShares()
        # Whether no STORE gets a place any more: the server drains.
        self.closed = False
        # The session that a STORE counts for, until it has said that it needs room.
        self._needing = 0

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: PackedKey) -> bool:
        return key in self._objects

    # what others hear, under the lock: nothing here

    def on_reserved(self, items: Sequence[tuple[PackedKey, int]], result: Reservation, used_before: int) -> None:
        """A reservation has been made, or refused; before it, `used_before` bytes were used."""

    def on_committed(self, objects: list[StoredObject], use: Use) -> None:
        """Objects have come."""

    def on_used(self, objects: list[StoredObject]) -> None:
        """Objects have been used by a request."""

    def on_promised(self, objects: list[StoredObject], retain: Retain) -> None:
        """Tiers are to keep objects, which were just committed or used."""

    def on_writers_ended(self) -> None:
        """Writers may have ended."""

    def was_done(self, key: PackedKey) -> bool:
        """Whether an object that is not here was evicted early by a hint."""
        return False

    @property
    def write_leases(self) -> int:
        return len(self._leases.writes)

    @property
    def pin_leases(self) -> int:
        return len(self._leases.pins)

    def account(self, client: int, namespace: bytes, tenant: int) -> Account:
        """Return the account of a client session, see `Accounts`; takes the lock only to make it."""
        account = self.accounts.get((client, namespace, tenant))
        if account is None:
            with self.lock:
                account = self.accounts.of(client, namespace, tenant)
        return account

    def belongs(self, salt: bytes, tenant: int) -> None:
        """Remember that objects whose keys have this salt are of the tenant with this number, from 1, in the order of
        `tenants`. Takes the lock only for a salt that is not remembered."""
        if not self.tenants.knows(salt):
            with self.lock:
                self.tenants.learn(salt, tenant)

    @locked
    def reserve(
        self,
        items: Sequence[tuple[PackedKey, int]],
        *,
        owner: int,
        request_id: str = "",
        lease_s: float | None = None,
        most_bytes: float = math.inf,
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
        refuse the last ones. Raises `RequestError` if the owner holds too many leases."""
        used_before = self.used_bytes
        space = most_bytes - (self._reserved_bytes(owner) if most_bytes < math.inf else 0)
        self._needing = payer = self.shares.payer(payer or client)
        deadline = self._deadline(lease_s)
        lease = self._leases.open(WriteLease(owner, request_id, deadline, payer, use=use, prompt=prompt))
        if items:
            first = items[0][0]
            lease.tenant = self.tenants.of(first)
            lease.account = self.accounts.of(client, first, lease.tenant)
        # Objects that this request needs must not be evicted by itself or by others until it is stored.
        here = self._objects.find([key for key, _ in items])
        lease.present = [stored for stored in here if stored is not None]
        if lease.present:
            self._pin(lease.present, lease.payer)
            if prompt.retain:
                lease.present_chunks = prompt.of([index for index, stored in enumerate(here) if stored is not None])
        if self.shares.is_bound(lease.payer, self._now):
            space = min(space, self.shares.space_left(lease.payer))
        result = Reservation(lease)
        try:
            self._place_all(items, here, space, result, lease)
        except BaseException:
            # A policy that raises must not leave keys that no writer will ever commit.
            lease.nbytes = 0
            self._drop_write_lease(lease)
            raise
        finally:
            self._end_store()
        self.shares.add(lease.payer, lease.nbytes)
        lease.chunks = prompt.of([index for index, _ in result.placed])
        if lease.items and self._journal is not None:
            lease.slots = self._journal.reserve(lease.items, owner=owner, tenant=lease.tenant)
        if not lease.items:
            result.lease = None
            self._leases.close(lease)
            self._present_used(lease)
        self.on_reserved(items, result, used_before)
        return result

    @locked
    def reserve_some(
        self, items: Sequence[tuple[PackedKey, int]], some: Collection[int], *, prompt: PromptPart, **named: Any
    ) -> Reservation:
        """Reserve ranges for the items with the indices `some`, see `reserve`. Other present items are pinned with the
        lease, so that the end of a prefix never evicts its beginning; they do not count in the result."""
        here = self.which_present([key for key, _ in items])
        chosen = [index for index, present in enumerate(here) if present or index in some]
        part = prompt._replace(chunks=prompt.of(chosen))
        result = self.reserve([items[index] for index in chosen], prompt=part, **named)
        result.present -= len(chosen) - len(some)
        result.placed = [(chosen[at], offset) for at, offset in result.placed]
        return result

    @locked
    def lease_size(self, lease_id: str, *, owner: int) -> int:
        """Return the number of objects of a write lease. Raises `LeaseUnknown`."""
        return len(self._leases.write(lease_id, owner).items)

    @locked
    def commit(self, lease_id: str, *, owner: int) -> list[StoredObject]:
        """Publish a lease's objects and end it; an expired one only frees its ranges: []. Raises `LeaseUnknown`."""
        now = self._now = self.clock()
        lease = self._leases.write(lease_id, owner)
        if now >= lease.deadline:
            self._quarantine(lease)
        if lease.quarantined:
            self._drop_write_lease(lease)
            self.on_writers_ended()
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
        account.objects += len(objects)
        account.nbytes += lease.nbytes
        account.stored += len(objects)
        facts = self._facts(lease.use, lease.request_id, tenant, lease.prompt.chunk_tokens)
        is_first = [not self.was_done(stored.key) for stored in objects] if lease.prompt.retain else ()
        for span, some, of in self._runs(objects, lease.prompt._replace(chunks=lease.chunks), facts, is_first):
            self.tenants.inserted(tenant, some, lease.chunks[span], of)
        if lease.prompt.retain and self._journal is not None:
            self._journal.used(objects)
        self._present_used(lease)
        self.on_committed(objects, lease.use)
        self.on_writers_ended()
        return objects

    @locked
    def abort(self, lease_id: str, *, owner: int) -> int:
        """Free a lease's ranges unpublished; return the number of objects. Raises `LeaseUnknown`."""
        lease = self._leases.write(lease_id, owner)
        self._drop_write_lease(lease)
        self.on_writers_ended()
        return len(lease.items)

    @locked
    def any_writing(self, keys: Iterable[PackedKey]) -> bool:
        return any(key in self._writing for key in keys)

    def find(self, keys: Sequence[PackedKey]) -> list[StoredObject] | None:
        """Return the objects of all `keys`, None if one is missing; for who holds the lock."""
        found = [stored for stored in self._objects.find(keys) if stored is not None]
        return found if len(found) == len(keys) else None

    @locked
    def which_present(self, keys: Sequence[PackedKey]) -> list[bool]:
        return [stored is not None for stored in self._objects.find(keys)]

    @locked
    def use_present(self, keys: Sequence[PackedKey]) -> list[bool]:
        """Return which of `keys` are readable, given in the order of a prompt; counts as a use of each."""
        found = self._objects.find(keys)
        self._used([stored for stored in found if stored is not None], "store", "", 0)
        return [stored is not None for stored in found]

    @locked
    def pin(
        self,
        keys: Sequence[PackedKey],
        *,
        owner: int,
        request_id: str = "",
        lease_s: float | None = None,
        use: Use | None = "lookup",
    ) -> PinLease | None:
        """Pin all of `keys`; pins none and returns None if one is missing, or the owner's share of L1 is pinned. Counts
        as a `use` of each, unless that is None."""
        found = self.find(keys)
        if found is None:
            return None
        lease = self.pin_objects(found, owner=owner, request_id=request_id, lease_s=lease_s, use=use)
        return lease if self.keep_within_share(lease) else None

    @locked
    def pin_objects(
        self,
        objects: list[StoredObject],
        *,
        owner: int,
        request_id: str = "",
        lease_s: float | None = None,
        use: Use | None = "lookup",
        prompt: PromptPart = NO_PROMPT,
        asked_by: int | None = None,
        hit: bool = False,
    ) -> PinLease:
        """Pin objects of this table that were found since the caller took the lock, in the order of a prompt; the lease
        owns the list. `prompt` has their places if the request says anything of their future. `asked_by` is the session
        that the pins count for, None: the owner. A `hit` may lapse when others need room. Raises `RequestError` if that
        session holds too many leases or pins."""
        payer = self.shares.payer(owner if asked_by is None else asked_by)
        lease = PinLease(owner, request_id, self._deadline(lease_s), payer, objects=objects, hit=hit)
        self._leases.open(lease)
        self._pin(objects, lease.payer)
        if use is not None:
            self._used(objects, use, request_id, objects[0].tenant if objects else 0, prompt)
        return lease

    @locked
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
        """Pin the objects that `find` finds in the rows of L1, for a load, which counts as a use of each; None if
        `find` returns None, or the share of L1 of the session that asks is pinned."""
        objects = find(self.row)
        if objects is None:
            return None
        session, shares = owner if asked_by is None else asked_by, self.shares
        payer = objects[0].payer if objects else 0
        if payer > 0 and shares.payer(session) == session != payer and self._leases.has_hit(payer, request_id):
            # Another session alone pins them, by a hit of the same request: the scheduler of this worker.
            shares.work_for(session, payer)
        lease = self.pin_objects(
            objects,
            owner=owner,
            request_id=request_id,
            lease_s=lease_s,
            use="retrieve",
            prompt=prompt,
            asked_by=asked_by,
        )
        return lease if self.keep_within_share(lease) else None

    @locked
    def pin_again(self, lease_id: str, indices: Sequence[int], *, owner: int) -> PinLease:
        """Pin for the server objects pinned by the client `owner`, which is no use. Raises `LeaseUnknown`."""
        pinned = self.pinned(lease_id, owner=owner)
        return self.pin_objects([pinned[index] for index in indices], owner=INTERNAL_OWNER, use=None, asked_by=owner)

    @locked
    def pinned(self, lease_id: str, *, owner: int) -> list[StoredObject]:
        """Return the objects under a pin lease. Raises `LeaseUnknown`."""
        return self._own_pin_lease(lease_id, owner).objects

    @locked
    def unpin(self, lease_id: str, *, owner: int, use: Use | None = None, prompt: PromptPart = NO_PROMPT) -> PinLease:
        """End a pin lease, whose pins have held until now. With a `use`, which it turns out to have been, that of each
        object; `prompt` as for `pin_objects`. Raises `LeaseUnknown`, also where the lease has lapsed."""
        lease = self._own_pin_lease(lease_id, owner)
        if use is not None and lease.objects:
            self._used(lease.objects, use, lease.request_id, lease.objects[0].tenant, prompt)
        self._drop_pin_lease(lease)
        return lease

    def hold(self, keys: Sequence[PackedKey]) -> list[StoredObject]:
        """Pin the objects of those of `keys` that are here, for the server itself, until `let_go`; return them. Counts
        as no use. Such pins are many and short, and under no lease. For who holds the lock, as `let_go`."""
        here = [stored for stored in self._objects.find(keys) if stored is not None]
        self._pin(here, INTERNAL_OWNER)
        return here

    def let_go(self, objects: Sequence[StoredObject]) -> None:
        self._unpin(objects, INTERNAL_OWNER)

    @locked
    def work_for(self, session: int, payer: int) -> None:
        """Let what a session pins count for another one of its engine."""
        self.shares.work_for(session, payer)

    def keep_within_share(self, lease: PinLease) -> bool:
        """Return whether a lease may stay that cannot lapse; if not, it ends. While others need space, the session's
        oldest hits lapse for it first. For who holds the lock."""
        shares, payer = self.shares, lease.payer
        if shares.is_bound(payer, self._now):
            self._end_hits(payer)
            if payer in shares.over:
                self._drop_pin_lease(lease)
                shares.cut(payer)
                return False
        return True

    @locked
    def expire(self) -> None:
        """Quarantine write leases and lapse pin leases whose deadline has passed. Unpins about `UNPIN_AT_ONCE` objects
        at most; other leases lapse in the next calls, or on access."""
        now = self._now = self.clock()
        for write in self._leases.writes.values():
            if now >= write.deadline:
                self._quarantine(write)
        unpinned = 0
        for pins in list(self._leases.pins.values()):
            if now >= pins.deadline and unpinned < UNPIN_AT_ONCE:
                unpinned += len(pins.objects)
                self._lapse(pins)
                self.lapses += 1

    @locked
    def end_owner(self, owner: int) -> int:
        """End all leases of an owner that has ended, and so writes and reads no more; return their number."""
        self.accounts.end(owner)
        self.shares.end_session(owner)
        leases = self._leases.of(owner)
        for lease in leases:
            if isinstance(lease, PinLease):
                self._drop_pin_lease(lease)
            else:
                self._drop_write_lease(lease)
        self.on_writers_ended()
        return len(leases)

    @locked
    def cancel(self, owner: int, request_id: str | None = None) -> int:
        """End the claims of a live owner (of one request if given); return their number. Its pins end. Its write leases
        will not be published, but the owner may still be writing: the ranges are quarantined."""
        ended = 0
        for lease in self._leases.of(owner, request_id):
            if isinstance(lease, PinLease):
                self._drop_pin_lease(lease)
                ended += 1
            elif not lease.quarantined:
                self._quarantine(lease, late=False)
                ended += 1
        self.on_writers_ended()
        return ended

    @locked
    def objects(self) -> list[StoredObject]:
        """Return all readable objects as of now, in no particular order."""
        return list(self._objects)

    @locked
    def drop_unused(self, objects: Iterable[StoredObject]) -> tuple[list[StoredObject], int]:
        """Drop those of `objects` that are still in the table and not pinned: (dropped, number of pinned ones)."""
        here = [stored for stored in objects if self._objects.get(stored.key) is stored]
        dropped = [stored for stored in here if not stored.pins]
        for stored in dropped:
            self._remove(stored, Cause.CLEARED)
        self.tenants.report_removals()
        return dropped, len(here) - len(dropped)

    @locked
    def drop(self, keys: Iterable[PackedKey], cause: Cause = Cause.CLEARED) -> int:
        """Drop those of `keys` that are here and not pinned; return their number."""
        dropped = 0
        for stored in self._objects.unpinned(keys):
            self._remove(stored, cause)
            dropped += 1
        self.evictions += dropped * (cause <= LAST_EVICTION)
        self.tenants.report_removals()
        return dropped

    def keep_in(self, journal: Journal) -> None:
        """Record what the table holds, and each change from now on; for who holds the lock."""
        self._journal = journal
        for stored in self._objects:
            slots = journal.reserve([(stored.key, stored.offset, stored.length)], owner=0, tenant=stored.tenant)
            journal.commit(slots, stored.used)
            stored.slot = slots[0]
        for lease in self._leases.writes.values():
            lease.slots = journal.reserve(lease.items, owner=lease.owner, tenant=lease.tenant)

    @locked
    def sealed(self, checksums: Mapping[PackedKey, int]) -> None:
        """Record the checksums of objects for the next server."""
        if self._journal is not None:
            for key, checksum in checksums.items():
                stored = self._objects.get(key)
                if stored is not None:
                    self._journal.sealed(stored.slot, checksum)

    def adopt(self, found: Found, tenants: Sequence[int]) -> None:
        """Take over what the journal of an earlier server holds, into an empty table. `tenants` has the number of each
        tenant of that server, from 1. All its reservations are quarantined, until `writer_ended`."""
        number = (0, *tenants)
        now = self._now = self.clock()
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
        """Free the ranges of a client of an earlier server, which writes no more; for who holds the lock."""
        for range_ in self._foreign.pop(writer, ()):
            if self._journal is not None:
                self._journal.release((range_.slot,))
            self.quarantined_bytes -= rounded(range_.length)
            self._free(range_.offset, range_.length, range_.tenant)

    def _place_all(
        self,
        items: Sequence[tuple[PackedKey, int]],
        here: Sequence[StoredObject | None],
        space: float,
        result: Reservation,
        lease: WriteLease,
    ) -> None:
        writing, of, length = self._writing, -1, 0
        end = self._admitted(items, here, lease) if lease.tenant in self.tenants.refusing else len(items)
        if self.closed and lease.use == "store":
            end = 0
        for index, (key, nbytes) in enumerate(items):
            if here[index] is not None:
                result.present += 1
            elif key in writing:
                result.in_flight += 1
            elif result.stopped_at is not None:
                result.dropped += 1
            else:
                if nbytes != of:
                    of, length = nbytes, rounded(nbytes)
                offset = self._place(length, key, lease.tenant) if length <= space and index < end else None
                if offset is None:
                    result.stopped_at, result.dropped = index, 1
                    result.refused = index >= end
                    left = self.tenants.space_left(lease.tenant, self.allocator.limit)
                    result.over_share = length > min(space, left)
                    continue
                space -= length
                lease.nbytes += length
                lease.items.append((key, offset, nbytes))
                result.placed.append((index, offset))
                writing[key] = lease

    def _admitted(
        self, items: Sequence[tuple[PackedKey, int]], here: Sequence[StoredObject | None], lease: WriteLease
    ) -> int:
        """Return the index of the first absent object that the policy refuses, or the number of items."""
        absent = [index for index, (key, _) in enumerate(items) if here[index] is None and key not in self._writing]
        if not absent:
            return len(items)
        facts = self._facts(lease.use, lease.request_id, lease.tenant, lease.prompt.chunk_tokens)
        keys, sizes = [items[index][0] for index in absent], [items[index][1] for index in absent]
        count = self.tenants.policies[lease.tenant].admits(keys, sizes, lease.prompt.of(absent), facts)
        return absent[count] if 0 <= count < len(absent) else len(items)

    def _need_room(self) -> None:
        """Let the oldest hits of the sessions above their share lapse, for the STORE of another one."""
        payer, self._needing = self._needing, 0
        if not payer:
            return
        self.shares.need(payer, self._now)
        for other in self.shares.over - {payer}:
            self._end_hits(other)
            # The walk may have passed over objects that are unpinned now.
            self._victims.end()

    def _end_hits(self, payer: int) -> None:
        """Let the oldest hits of a session lapse until it holds no more than its share."""
        for lease in self._leases.hits(payer):
            if payer not in self.shares.over:
                return
            self._lapse(lease)
            self.shares.cut(payer)

    def _facts(self, use: Use, request_id: str, tenant: int, chunk_tokens: int = 0) -> RequestFacts:
        compute_s, load_s = self.prices
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
        facts = self._facts(use, request_id, tenant)
        for _, some, of in self._runs(objects, prompt, facts, [False] * len(objects) if prompt.retain else ()):
            self.tenants.accessed(some, of)
        if self._journal is not None:
            self._journal.used(objects)
        self.on_used(objects)

    def _runs(
        self, objects: list[StoredObject], prompt: PromptPart, facts: RequestFacts, is_first: Sequence[bool]
    ) -> list[tuple[slice, list[StoredObject], RequestFacts]]:
        """Return the runs of objects of which their request says the same, the last run first; each is used now."""
        now = self._now
        for stored in objects:
            stored.used = now
        if not prompt.retain:
            return [(slice(None), objects, facts)]
        runs = []
        chunks = prompt.chunks or [-1] * len(objects)
        for span, retain in runs_of(chunks, prompt.chunk_tokens, prompt.retain, is_first):
            some, of = objects[span], with_hint(facts, retain)
            if of.hint == "done":
                for stored in some:
                    stored.used = -now
            if retain is not None and retain.tiers_s:
                self.on_promised(some, retain)
            runs.append((span, some, of))
        return runs

    def _present_used(self, lease: WriteLease) -> None:
        """Unpin the objects that were present before a lease that has ended, and count the request as a use of each."""
        present = self._release_present(lease)
        self._used(
            present, lease.use, lease.request_id, lease.tenant, lease.prompt._replace(chunks=lease.present_chunks)
        )

    def _deadline(self, lease_s: float | None) -> float:
        return NO_DEADLINE if lease_s is None else self.clock() + lease_s

    def _reserved_bytes(self, owner: int) -> int:
        writes = [lease for lease in self._leases.of(owner) if isinstance(lease, WriteLease)]
        return sum(rounded(nbytes) for lease in writes for _, _, nbytes in lease.items)

    def _pin(self, objects: Sequence[StoredObject], payer: int) -> None:
        self.shares.pin(objects, payer)
        self.pins += len(objects)

    def _unpin(self, objects: Sequence[StoredObject], payer: int) -> None:
        self.shares.unpin(objects, payer)
        self.pins -= len(objects)

    def _quarantine(self, lease: WriteLease, *, late: bool = True) -> None:
        """`late`: the deadline has passed; otherwise the writer gave the lease up, which counts as no failure."""
        if not lease.quarantined:
            lease.quarantined = True
            self.quarantines += late
            self._release_present(lease)
            for key, _, _ in lease.items:
                del self._writing[key]
            self.quarantined_bytes += lease.nbytes

    def _lapse(self, lease: PinLease) -> None:
        self._drop_pin_lease(lease)
        lease.objects, lease.held = [], False

    def _release_present(self, lease: WriteLease) -> list[StoredObject]:
        present, lease.present = lease.present, []
        self._unpin(present, lease.payer)
        return present

    def _drop_write_lease(self, lease: WriteLease) -> None:
        self._leases.close(lease)
        self._release_present(lease)
        self.shares.add(lease.payer, -lease.nbytes)
        if self._journal is not None:
            self._journal.release(lease.slots)
        if lease.quarantined:
            self.quarantined_bytes -= lease.nbytes
        for key, offset, nbytes in lease.items:
            if not lease.quarantined:
                del self._writing[key]
            self._free(offset, nbytes, lease.tenant)

    def _drop_pin_lease(self, lease: PinLease) -> None:
        self._leases.close(lease)
        self._unpin(lease.objects, lease.payer)

    def _own_pin_lease(self, lease_id: str, owner: int) -> PinLease:
        lease = self._leases.pin(lease_id, owner)
        if self.clock() >= lease.deadline:
            self._lapse(lease)
            self.lapses += 1
            return self._leases.pin(lease_id, owner)  # there is none
        return lease
