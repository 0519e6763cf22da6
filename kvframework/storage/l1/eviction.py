"""Eviction from L1: the tenants and their policies, what a policy hears, and which objects leave for a STORE. Pure.

Tenant 0 is everyone without a name; without named tenants there is one eviction policy and no rule. A named tenant

* never holds more than `most` bytes, reserved and quarantined ranges included: what it stores beyond that replaces its
  own objects;
* never has fewer than `least` bytes because of others: their objects take the place of its own only as long as it
  holds more.

Each tenant has an eviction policy of its own; across tenants, the object that was used longest ago leaves first.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import NamedTuple

import msgspec

from kvframework.api.eviction import EvictionPolicy, RequestFacts, Why
from kvframework.api.keys import NAMESPACE_BYTES, SALT_BYTES, PackedKey, Retain
from kvframework.storage.l1.entries import ALIGNMENT, ObjectRows, RangeAllocator, StoredObject, rounded
from kvframework.storage.l1.eviction_statistics import LAST_EVICTION, Cause
from kvframework.storage.l1.journal import Journal

# Salts in keys that are remembered as a tenant's: one for each salt and order of layers.
MAX_SALTS = 1 << 16
SALT = slice(NAMESPACE_BYTES, NAMESPACE_BYTES + SALT_BYTES)

_key_of = attrgetter("key")
_used_of = attrgetter("used")


def runs_of(
    chunks: Sequence[int], chunk_tokens: int, retains: Sequence[Retain], is_first: Sequence[bool]
) -> list[tuple[slice, Retain | None]]:
    """Return the runs of a request's objects of which it says the same, the last run first, as the policies get them.
    `chunks` are their places in the prompt; `is_first`: whether the request is the first one to store an object, as of
    others a request that is done says nothing."""
    of = {chunk: _fitting(retains, chunk * chunk_tokens, (chunk + 1) * chunk_tokens) for chunk in set(chunks)}
    said = [
        of[chunk] if first or not _is_done(of[chunk]) else None for chunk, first in zip(chunks, is_first, strict=True)
    ]
    runs, end = [], 0
    for retain, run in groupby(said):
        begin, end = end, end + len(list(run))
        runs.append((slice(begin, end), retain))
    return runs[::-1]


def _is_done(retain: Retain | None) -> bool:
    """Whether that is said of a whole request."""
    return retain is not None and retain.what == "done" and retain.start is None


def _fitting(retains: Sequence[Retain], first: int, end: int) -> Retain | None:
    """Return the first that is said of all tokens of a chunk; of one without a place what is said of the request."""
    for retain in retains:
        if retain.start is None or (retain.start <= first and first >= 0 and (retain.end is None or end <= retain.end)):
            return retain
    return None


def with_hint(facts: RequestFacts, retain: Retain | None) -> RequestFacts:
    if retain is None:
        return facts
    if retain.what == "done":
        return msgspec.structs.replace(facts, hint="done")
    return msgspec.structs.replace(facts, hint="keep", keep_s=retain.duration, priority=retain.priority)


class Tenant(NamedTuple):
    """A named tenant: the bytes of L1 guaranteed to it, the most that it gets, and the policy of its objects."""

    name: str
    least: int
    most: int
    policy: EvictionPolicy


class Tenants:
    """See the module. `policy` is that of tenant 0; `used` has the bytes of each tenant. A policy must not be called
    while its victims are walked, so a STORE's objects leave first, and policies learn it by `report_removals`."""

    def __init__(self, policy: EvictionPolicy, named: Sequence[Tenant] = ()) -> None:
        self.policies = (policy, *(tenant.policy for tenant in named))
        self.names = ("", *(tenant.name for tenant in named))
        # Tenants whose policy may refuse objects.
        self.refusing = frozenset(
            tenant for tenant, of in enumerate(self.policies) if type(of).admits is not EvictionPolicy.admits
        )
        self.used = [0] * len(self.policies)
        self._least = (0, *(tenant.least for tenant in named))
        self._most: tuple[float, ...] = (math.inf, *(tenant.most for tenant in named))
        self._salts: dict[bytes, int] = {}
        # Objects that left and are not reported yet, in this order: empty between two calls of the table.
        self._left: dict[Why, list[StoredObject]] = {"evicted": [], "cleared": [], "removed": []}

    @property
    def any_named(self) -> bool:
        return len(self.policies) > 1

    def learn(self, salt: bytes, tenant: int) -> None:
        """Remember that the objects whose keys have this salt are `tenant`'s, from the next reservation on."""
        if len(self._salts) >= MAX_SALTS and salt not in self._salts:
            del self._salts[next(iter(self._salts))]
        self._salts[salt] = tenant

    def knows(self, salt: bytes) -> bool:
        return salt in self._salts

    def salts(self, tenant: int) -> set[bytes]:
        """Return the salts in keys that are remembered as a tenant's."""
        return {salt for salt, number in self._salts.items() if number == tenant}

    def of(self, key: PackedKey) -> int:
        """Return whose an object with this key is; 0 for a salt that is not remembered."""
        return self._salts.get(key[SALT], 0) if self._salts else 0

    def inserted(
        self, tenant: int, objects: Sequence[StoredObject], chunks: Sequence[int], facts: RequestFacts
    ) -> None:
        """Report new objects of a tenant, given in the order of a prompt; the policy receives the last chunk first, so
        that one by recency evicts a prefix from its end."""
        last_first = objects[::-1]
        sizes = [stored.length for stored in last_first]
        if facts.hint == "keep":
            facts = msgspec.structs.replace(facts, sizes=sizes)
        self.policies[tenant].on_inserts(list(map(_key_of, last_first)), sizes, chunks[::-1], facts)

    def accessed(self, objects: Sequence[StoredObject], facts: RequestFacts) -> None:
        """Report uses of objects, given in the order of a prompt; the policy receives the end of the prompt first."""
        for tenant, own in self._by_tenant(objects[::-1]):
            of_tenant = facts
            if self.any_named:
                of_tenant = msgspec.structs.replace(facts, tenant=self.names[tenant], held=self.used[tenant])
            if facts.hint == "keep":
                of_tenant = msgspec.structs.replace(of_tenant, sizes=[stored.length for stored in own])
            self.policies[tenant].on_uses(list(map(_key_of, own)), of_tenant)

    def removed(self, stored: StoredObject, cause: Cause) -> None:
        """Note an object that leaves; `report_removals` follows."""
        why: Why = "evicted"
        if cause > LAST_EVICTION:
            why = "cleared" if cause is Cause.CLEARED else "removed"
        self._left[why].append(stored)

    def report_removals(self) -> None:
        """Report what left to the policies, in the order in which it did."""
        for why, left in self._left.items():
            if left:
                self._left[why] = []
                for tenant, own in self._by_tenant(left):
                    self.policies[tenant].on_removes(list(map(_key_of, own)), why)

    def _by_tenant(self, objects: Sequence[StoredObject]) -> Iterable[tuple[int, Sequence[StoredObject]]]:
        if not self.any_named:
            return [(0, objects)] if objects else []
        tenants = {stored.tenant for stored in objects}
        return [(tenant, [stored for stored in objects if stored.tenant == tenant]) for tenant in tenants]

    # what each may hold, and who loses what

    def space_left(self, tenant: int, limit: int) -> float:
        """Return the bytes that the tenant may still get, infinity if it may hold all `limit` bytes of L1."""
        most = self._most[tenant]
        return math.inf if most >= limit else most - self.used[tenant]

    def spare(self, tenant: int | None = None) -> list[int] | None:
        """Return the bytes that each tenant may lose for a new object of `tenant`, or, for None, to get below the
        watermark; None if there is no rule."""
        if not self.any_named:
            return None
        spare = [max(used - least, 0) for used, least in zip(self.used, self._least, strict=True)]
        if tenant is not None:
            spare[tenant] = self.used[tenant]
        return spare

    def own(self, tenant: int) -> list[int]:
        """Return the bytes that each tenant may lose if only `tenant`'s own objects may leave."""
        return [used if index == tenant else 0 for index, used in enumerate(self.used)]

    def evictable(self, tenant: int, objects: ObjectRows) -> Iterator[StoredObject]:
        """Yield a tenant's objects that are not pinned, in the order of its policy."""
        return objects.unpinned(self.policies[tenant].victims())

    def victims(
        self,
        of: Callable[[int], Iterator[StoredObject]],
        spare: list[int] | None,
        *,
        last: int | None = None,
        all_leave: bool = False,
    ) -> Iterator[StoredObject]:
        """Yield the objects that may leave, none larger than what its tenant may lose, in the order in which they
        should; with `all_leave`, all of them together. `of` has those of one tenant. Those of tenant `last` come last
        while it holds less than what is guaranteed to it."""
        if spare is None:
            return of(0)
        parts = {
            tenant: _affordable(of(tenant), most, all_leave=all_leave) for tenant, most in enumerate(spare) if most
        }
        behind: Iterable[StoredObject] = ()
        if last is not None and self.used[last] < self._least[last]:
            behind = parts.pop(last, ())
        return chain(heapq.merge(*parts.values(), key=_used_of), behind)


def _affordable(objects: Iterator[StoredObject], most: int, *, all_leave: bool) -> Iterator[StoredObject]:
    """Yield objects up to the first one that is too large."""
    for stored in objects:
        length = rounded(stored.length)
        if length > most:
            return
        yield stored
        most -= length * all_leave


class Victims:
    """The victims of one STORE: each policy is asked once, when first needed, however many objects are stored. Those
    that stay after a look for one place come first for the next. No policy may be called before `end`."""

    def __init__(self, tenants: Tenants, objects: ObjectRows) -> None:
        self._tenants = tenants
        self._objects = objects
        # By tenant: victims that the policy still names, victims to look at before these (reversed), victims looked at.
        self._walks: dict[int, Iterator[StoredObject]] = {}
        self._again: defaultdict[int, list[StoredObject]] = defaultdict(list)
        self._looked: defaultdict[int, list[StoredObject]] = defaultdict(list)

    def next(self, tenant: int) -> StoredObject | None:
        """Return the tenant's next victim, None if there is none; it leaves, or is put back."""
        again = self._again[tenant]
        while again:
            stored = again.pop()
            # A window may have taken it along.
            if self._objects.get(stored.key) is stored:
                return stored
        walk = self._walks.get(tenant)
        if walk is None:
            walk = self._walks[tenant] = self._tenants.evictable(tenant, self._objects)
        return next(walk, None)

    def put_back(self, tenant: int, stored: StoredObject) -> None:
        self._again[tenant].append(stored)

    def look_at(self, tenant: int) -> Iterator[StoredObject]:
        """Yield the next victims of a tenant, until `stay`."""
        while (stored := self.next(tenant)) is not None:
            self._looked[tenant].append(stored)
            yield stored

    def stay(self) -> None:
        for tenant, looked in self._looked.items():
            self._again[tenant] += reversed(looked)
        self._looked.clear()

    def end(self) -> None:
        self._walks.clear()
        self._again.clear()
        self._looked.clear()


# The objects that leave for one place. The policy's order decides, as far as addresses allow. The first victim is
# enough if its own range suffices: the usual case, since objects of one namespace are about equal in size. Otherwise a
# window of the arena is chosen, of the needed length and without pinned, reserved or quarantined ranges: of the windows
# that begin at one of the policy's next victims, the one with the most bytes of such victims and of free ranges.
#
# The bound: the chosen objects have less than twice the needed bytes, or one object alone has enough, and no tenant
# loses more than it may. If there is no window, nothing is chosen. Up to some ten thousand objects are examined, around
# the policy's next victims: the cost of a placement does not grow with L1.

# The first search for a window covers the next victims up to this multiple of the needed bytes.
LOOK_AHEAD = 2
# Objects that one choice examines, plus two for each needed page, and the bound of both: other requests wait for it,
# even if it finds nothing. Some milliseconds for objects of megabytes, some hundred at the most.
MOST_LOOKS = 1 << 13
MOST_LOOKS_IN_ALL = 1 << 16


def choose_window(
    length: int,
    victims: Iterator[StoredObject],
    objects: ObjectRows,
    allocator: RangeAllocator,
    spare: Sequence[int] | None = None,
) -> list[StoredObject]:
    """Return objects whose removal leaves `length` contiguous bytes free, a multiple of the alignment; [] for none.
    `victims` are the evictable objects, best first; the table must not change while this runs. `spare` has the bytes
    that each tenant may lose, None if none has a bound; each victim alone fits in."""
    first = next(victims, None)
    if first is None:
        return []
    search = _Search(length, objects, allocator, spare)
    if search.add(first) >= length:
        return [first]
    # Ever more victims, until a window is found or the bound is reached.
    wanted = LOOK_AHEAD * length
    while search.looks_left > 0:
        seen = 0
        for stored in islice(victims, search.looks_left):
            seen += rounded(stored.length)
            if search.add(stored) >= length or seen >= wanted:
                break
        window = search.best()
        if window or not seen:
            return window
        wanted *= 2
    return []


class _Search:
    def __init__(
        self, length: int, objects: ObjectRows, allocator: RangeAllocator, spare: Sequence[int] | None
    ) -> None:
        self._length = length
        self._objects = objects
        self._allocator = allocator
        self._spare = spare
        self.looks_left = min(MOST_LOOKS + 2 * (length // ALIGNMENT), MOST_LOOKS_IN_ALL)
        # The next victims, and free ranges beside them: length by offset.
        self._cheap: dict[int, int] = {}
        # Offsets at which the walk of a window was blocked, in order.
        self._barriers: list[int] = []

    def add(self, stored: StoredObject) -> int:
        """Add a victim; return the contiguous bytes that are free after its removal."""
        self.looks_left -= 1
        offset, length = stored.offset, rounded(stored.length)
        before, after = self._allocator.free_before(offset), self._allocator.free_at(offset + length)
        if before:
            self._cheap[offset - before] = before
        self._cheap[offset] = length
        if after:
            self._cheap[offset + length] = after
        return before + length + after

    def best(self) -> list[StoredObject]:
        for start in self._starts():
            at = bisect_left(self._barriers, start)
            if at < len(self._barriers) and self._barriers[at] < start + self._length:
                continue
            window = self._walk(start)
            if window or self.looks_left <= 0:
                return window
        return []

    def _starts(self) -> list[int]:
        """Return the possible starts of windows: those with the most cheap bytes first, then in the policy's order."""
        rank = {offset: index for index, offset in enumerate(self._cheap)}
        extents = sorted(self._cheap.items())
        starts: list[tuple[int, int, int]] = []
        covered = ranks = ahead = 0
        for offset, length in extents:
            while ahead < len(extents) and extents[ahead][0] < offset + self._length:
                covered += extents[ahead][1]
                ranks += rank[extents[ahead][0]]
                ahead += 1
            starts.append((-min(covered, self._length), ranks, offset))
            covered -= length
            ranks -= rank[offset]
        return [offset for _, _, offset in sorted(starts)]

    def _walk(self, start: int) -> list[StoredObject]:
        """Return the objects to evict for a window that begins here; [], and a new barrier, if part of it must stay."""
        window: list[StoredObject] = []
        left = None if self._spare is None else list(self._spare)
        at = start
        while at < start + self._length:
            self.looks_left -= 1
            free = self._allocator.free_at(at)
            stored = None if free else self._objects.at(at)
            if stored is not None and self._may_leave(stored):
                length = rounded(stored.length)
                if length >= self._length:
                    return [stored]
                if left is not None:
                    left[stored.tenant] -= length
                    if left[stored.tenant] < 0:
                        return []
                window.append(stored)
                at += length
            elif free:
                at += free
            else:
                insort(self._barriers, at)
                return []
        return window

    def _may_leave(self, stored: StoredObject) -> bool:
        return not stored.pins and (self._spare is None or rounded(stored.length) <= self._spare[stored.tenant])


class Places:
    """The ranges of the arena, and the readable objects in some of them: finds places, evicting where necessary.
    `nbytes` are free at first; `journal` hears of what leaves."""

    def __init__(self, tenants: Tenants, nbytes: int, journal: Journal | None) -> None:
        self.allocator = RangeAllocator()
        self.allocator.grow(nbytes)
        self.tenants = tenants
        self.used_bytes = 0
        self.evictions = 0
        self._journal = journal
        self._objects = ObjectRows()
        # The victims for the STORE that is being placed; no free range is as long as `_full`.
        self._victims = Victims(self.tenants, self._objects)
        self._full: float = math.inf

    def on_removed(self, stored: StoredObject, cause: Cause, by: PackedKey | None) -> None:
        """An object has left; `by` is the key of the object that it makes place for."""

    def _need_room(self) -> None:
        """The STORE that is being placed finds L1 full."""

    def candidates(self, used_bytes: int) -> list[PackedKey]:
        """Return the keys that leave to get down to `used_bytes`, without pinned objects and the shares of tenants."""
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

    def _place(self, length: int, key: PackedKey, tenant: int) -> int | None:
        tenants = self.tenants
        if self._full > length and not tenants.any_named and self.allocator.largest_free < length:
            self._need_room()
            self._full = length
        if length >= self._full:
            # The usual case: one leaves, and the other takes its very place.
            first = self._victims.next(0)
            if first is not None and rounded(first.length) == length:
                self.evictions += 1
                self._remove(first, Cause.ROOM, key, length)
                return first.offset
            if first is not None:
                self._victims.put_back(0, first)
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

    def _end_store(self) -> None:
        self._victims.end()
        self._full = math.inf
        self.tenants.report_removals()

    def _make_place(self, length: int, key: PackedKey, tenant: int, cause: Cause) -> int | None:
        """Evict for the object `key`; return the offset of its place, allocated."""
        tenants = self.tenants
        spare = tenants.spare(tenant) if cause is Cause.ROOM else tenants.own(tenant)
        victims = tenants.victims(self._victims.look_at, spare, last=tenant)
        self._evict(choose_window(length, victims, self._objects, self.allocator, spare), cause, key)
        offset = self.allocator.allocate(length)
        if spare is None:
            self._full = length if self.allocator.largest_free < length else math.inf
        return offset

    def _shrink(self, tenant: int, nbytes: float, key: PackedKey) -> bool:
        """Evict `nbytes` of a tenant's own objects for the object `key`; nothing if there are not as many."""
        leaving = []
        for stored in self.tenants.victims(self._victims.look_at, self.tenants.own(tenant)):
            leaving.append(stored)
            nbytes -= rounded(stored.length)
            if nbytes <= 0:
                break
        else:
            leaving = []
        self._evict(leaving, Cause.TENANT, key)
        return bool(leaving)

    def _evict(self, leaving: list[StoredObject], cause: Cause, key: PackedKey) -> None:
        for stored in leaving:
            self._remove(stored, cause, key)
        self.evictions += len(leaving)
        self._victims.stay()

    def _remove(self, stored: StoredObject, cause: Cause, by: PackedKey | None = None, taken: int = 0) -> None:
        """Remove an object, and free its range unless another one of its tenant takes all `taken` bytes of it;
        `Tenants.report_removals` follows."""
        if stored.used < 0.0 and cause <= LAST_EVICTION:
            cause = Cause.HINTED
        self._objects.remove(stored)
        if self._journal is not None:
            self._journal.release((stored.slot,))
        if not taken:
            self._free(stored.offset, stored.length, stored.tenant)
        account = stored.account.into or stored.account
        account.objects -= 1
        account.nbytes -= taken or rounded(stored.length)
        account.evicted += cause <= LAST_EVICTION
        self.tenants.removed(stored, cause)
        self.on_removed(stored, cause, by)

    def _free(self, offset: int, nbytes: int, tenant: int) -> None:
        length = rounded(nbytes)
        self.allocator.free(offset, length)
        self.used_bytes -= length
        self.tenants.used[tenant] -= length
