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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import NamedTuple

import msgspec

from kvframework.api.eviction import EvictionPolicy, Hint, RequestFacts, Why
from kvframework.api.keys import NAMESPACE_BYTES, SALT_BYTES, PackedKey, Retain
from kvframework.storage.l1.entries import ALIGNMENT, ObjectRows, RangeAllocator, StoredObject, rounded
from kvframework.storage.l1.eviction_statistics import LAST_EVICTION, Cause

# What `Retain`s say of the objects of one request, as parts that a policy gets in one call each. Pure.


class Part(NamedTuple):
    """Neighbours of which the same is said; the fields are those of `RequestFacts`."""

    objects: slice
    hint: Hint = ""
    keep_s: float = 0.0
    priority: int = 0

    def added_to(self, facts: RequestFacts) -> RequestFacts:
        return msgspec.structs.replace(facts, hint=self.hint, keep_s=self.keep_s, priority=self.priority)


def parts_of(
    chunks: Sequence[int], chunk_tokens: int, retains: Sequence[Retain], is_first: Sequence[bool]
) -> list[Part]:
    """Return the parts of a request's objects, the last part first, as the policies get them. `chunks` are their places
    in the prompt; `is_first`: whether the request is the first one to store an object."""
    of = {chunk: _fitting(retains, chunk * chunk_tokens, (chunk + 1) * chunk_tokens) for chunk in set(chunks)}
    said = [_allowed(of[chunk], is_first=first) for chunk, first in zip(chunks, is_first, strict=True)]
    return [_said(span, retain) for retain, span in _runs(said)][::-1]


def _fitting(retains: Sequence[Retain], first: int, end: int) -> Retain | None:
    """Return the first one that is said of all tokens of a chunk; of one at no known place (before 0) only what is said
    of the request."""
    for retain in retains:
        if retain.start is None or (retain.start <= first and first >= 0 and (retain.end is None or end <= retain.end)):
            return retain
    return None


def _allowed(retain: Retain | None, *, is_first: bool) -> Retain | None:
    """Return what is said of an object, None for a request that is done, but not the first one to store it."""
    if retain is None or retain.start is not None or retain.what == "keep" or is_first:
        return retain
    return None


def _said(objects: slice, retain: Retain | None) -> Part:
    if retain is None:
        return Part(objects)
    return Part(objects, "keep", retain.duration, retain.priority) if retain.what == "keep" else Part(objects, "done")


def _runs(values: Sequence[Retain | None]) -> Iterator[tuple[Retain | None, slice]]:
    first = 0
    for value, run in groupby(values):
        end = first + sum(1 for _ in run)
        yield value, slice(first, end)
        first = end


# Salts in keys that are remembered as a tenant's: one for each salt and order of layers.
MAX_SALTS = 1 << 16
SALT = slice(NAMESPACE_BYTES, NAMESPACE_BYTES + SALT_BYTES)

_key_of = attrgetter("key")
_used_of = attrgetter("used")


class Tenant(NamedTuple):
    """A named tenant: the bytes of L1 that are guaranteed to it, the most that it gets, and the policy of its
    objects."""

    name: str
    least: int
    most: int
    policy: EvictionPolicy


class Tenants:
    """See the module. `policy` is that of tenant 0; `used` has the bytes of each tenant."""

    def __init__(self, policy: EvictionPolicy, named: Sequence[Tenant] = ()) -> None:
        self.policies = (policy, *(tenant.policy for tenant in named))
        self.names = ("", *(tenant.name for tenant in named))
        # Those whose policy may refuse objects.
        self.refusing = frozenset(
            tenant for tenant, of in enumerate(self.policies) if type(of).admits is not EvictionPolicy.admits
        )
        self.used = [0] * len(self.policies)
        self._least = (0, *(tenant.least for tenant in named))
        self._most: tuple[float, ...] = (math.inf, *(tenant.most for tenant in named))
        self._salts: dict[bytes, int] = {}

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

    def of(self, key: PackedKey) -> int:
        """Return whose an object with this key is; 0 for a salt that is not remembered."""
        return self._salts.get(key[SALT], 0) if self._salts else 0

    def space_left(self, tenant: int, limit: int) -> float:
        """Return the bytes that the tenant may hold beyond what it holds, infinity if it may hold all `limit` bytes of
        L1: then L1 is its bound."""
        most = self._most[tenant]
        return math.inf if most >= limit else most - self.used[tenant]

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
        """Report uses of objects, in the order of the policy's calls."""
        if len(self.policies) == 1:
            self._accessed(0, objects, facts)
            return
        for tenant in {stored.tenant for stored in objects}:
            own = [stored for stored in objects if stored.tenant == tenant]
            of_tenant = msgspec.structs.replace(facts, tenant=self.names[tenant], held=self.used[tenant])
            self._accessed(tenant, own, of_tenant)

    def _accessed(self, tenant: int, objects: Sequence[StoredObject], facts: RequestFacts) -> None:
        if facts.hint == "keep":
            facts = msgspec.structs.replace(facts, sizes=[stored.length for stored in objects])
        self.policies[tenant].on_uses(list(map(_key_of, objects)), facts)

    def removed(self, objects: Sequence[StoredObject], why: Why) -> None:
        """Report objects that left, in the order in which they did."""
        if len(self.policies) == 1:
            if objects:
                self.policies[0].on_removes(list(map(_key_of, objects)), why)
            return
        for tenant in {stored.tenant for stored in objects}:
            self.policies[tenant].on_removes([stored.key for stored in objects if stored.tenant == tenant], why)

    def spare(self, tenant: int | None = None) -> list[int] | None:
        """Return the bytes that each tenant may lose for a new object of `tenant`, or, for None, to get below the
        watermark; None if there is no rule."""
        if len(self.policies) == 1:
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


# What left L1 and the eviction policies do not know yet. Pure.
#
# A policy must not be called while its victims are walked, so the objects of one STORE leave first, and the policies
# learn of all of them afterwards, at once.


class PendingRemovals:
    """Objects by reason, in the order in which they left. Empty between two calls of the table."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._evicted: list[StoredObject] = []
        self._others: list[tuple[StoredObject, Why]] = []

    def add(self, stored: StoredObject, cause: Cause) -> None:
        if cause <= LAST_EVICTION:
            self._evicted.append(stored)
        else:
            self._others.append((stored, "cleared" if cause is Cause.CLEARED else "removed"))

    def report(self) -> None:
        """Report them to the policies."""
        if self._evicted:
            evicted, self._evicted = self._evicted, []
            self._tenants.removed(evicted, "evicted")
        if self._others:
            others, self._others = self._others, []
            why: Why
            for why in ("cleared", "removed"):
                self._tenants.removed([stored for stored, reason in others if reason == why], why)


# Reports of uses to the eviction policy: few uses at once, many in batches. Pure.

# Uses that are reported to the policy in one call: a millisecond or two; and the number of batches that may wait.
REPORT_AT_ONCE = 1 << 13
MOST_UNREPORTED = 16


class Uses:
    """Waiting uses. Those of objects that have left meanwhile are skipped."""

    def __init__(self, tenants: Tenants, objects: ObjectRows) -> None:
        self._tenants = tenants
        self._objects = objects
        # Batches of uses too large to report at once, oldest first, each in the order of the policy's calls.
        self._unreported: deque[tuple[list[StoredObject], RequestFacts]] = deque()

    def add(self, objects: list[StoredObject], facts: RequestFacts) -> None:
        """Report uses of objects, given in the order of a prompt; the policy receives the end of the prompt first."""
        if len(objects) <= REPORT_AT_ONCE:
            self._tenants.accessed(objects[::-1], facts)
            return
        if len(self._unreported) == MOST_UNREPORTED:
            self._report(*self._unreported.popleft())
        self._unreported.append((objects[::-1], facts))

    def report_some(self) -> None:
        """Report some of the waiting uses to the policy, `REPORT_AT_ONCE` at most."""
        if self._unreported:
            batch, facts = self._unreported.popleft()
            if len(batch) > REPORT_AT_ONCE:
                self._unreported.appendleft((batch[REPORT_AT_ONCE:], facts))
            self._report(batch[:REPORT_AT_ONCE], facts)

    def _report(self, used: Sequence[StoredObject], facts: RequestFacts) -> None:
        here = [stored for stored in used if self._objects.get(stored.key) is stored]
        for first in range(0, len(here), REPORT_AT_ONCE):
            self._tenants.accessed(here[first : first + REPORT_AT_ONCE], facts)


# The victims of one STORE: each policy is asked for them once, however many objects it stores, and those are chosen
# that free a contiguous range. Pure; evicts nothing itself.
#
# The policy's order decides, as far as addresses allow. The first victim is enough if its own range suffices: the usual
# case, since objects of one namespace are about equal in size. Otherwise a window of the arena is chosen, of the needed
# length and without pinned, reserved or quarantined ranges: of the windows that begin at one of the policy's next
# victims, the one with the most bytes of such victims and of free ranges.
#
# The bound: the chosen objects have less than twice the needed bytes, or one object alone has enough, and no tenant
# loses more than it may. If there is no window, nothing is chosen. In an arena of up to some ten thousand objects all
# are examined; in a larger one as many around the policy's next victims, so that the cost of a placement does not grow
# with L1.


class VictimWalk:
    """The victims in order. Those that were looked at for one place and stay are the first ones for the next place."""

    def __init__(self, victims: Iterator[StoredObject], objects: ObjectRows) -> None:
        self._victims = victims
        self._objects = objects
        # In reverse.
        self._again: list[StoredObject] = []

    def next(self) -> StoredObject | None:
        """Return the next victim, None if there is none; it leaves, or is put back."""
        again = self._again
        while again:
            stored = again.pop()
            # A window may have taken it along.
            if self._objects.get(stored.key) is stored:
                return stored
        return next(self._victims, None)

    def put_back(self, stored: StoredObject) -> None:
        self._again.append(stored)

    def looked_at(self, into: list[StoredObject]) -> Iterator[StoredObject]:
        """Yield the next victims, and add them to `into`."""
        while (stored := self.next()) is not None:
            into.append(stored)
            yield stored

    def stay(self, looked: Sequence[StoredObject]) -> None:
        """Put back those that were looked at; those that leave are passed over."""
        self._again += reversed(looked)


class VictimWalks:
    """The walk of each tenant, begun when it is first needed. No policy may be called before the last one has ended."""

    def __init__(self, tenants: Tenants, objects: ObjectRows) -> None:
        self._tenants = tenants
        self._objects = objects
        self._walks: dict[int, VictimWalk] = {}
        self._looked: list[tuple[VictimWalk, list[StoredObject]]] = []

    def of(self, tenant: int) -> VictimWalk:
        walk = self._walks.get(tenant)
        if walk is None:
            walk = self._walks[tenant] = VictimWalk(self._tenants.evictable(tenant, self._objects), self._objects)
        return walk

    def looked_at(self, tenant: int) -> Iterator[StoredObject]:
        """Yield the next victims of a tenant, until `stay`."""
        walk, looked = self.of(tenant), list[StoredObject]()
        self._looked.append((walk, looked))
        return walk.looked_at(looked)

    def stay(self) -> None:
        """Put back those that were looked at and have not left."""
        for walk, looked in self._looked:
            walk.stay(looked)
        self._looked.clear()

    def end(self) -> None:
        """End the walks of a STORE."""
        self._walks.clear()
        self._looked.clear()


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
    that each tenant may lose, None if none has a bound; each victim alone fits in.
    """
    first = next(victims, None)
    if first is None:
        return []
    if _reach(first, allocator) >= length:
        return [first]
    return _Search(length, objects, allocator, spare).among(first, victims)


def _reach(stored: StoredObject, allocator: RangeAllocator) -> int:
    """Return the contiguous bytes that are free after the removal of the object."""
    end = stored.offset + rounded(stored.length)
    return allocator.free_before(stored.offset) + end - stored.offset + allocator.free_at(end)


class _Search:
    """The state of one choice."""

    def __init__(
        self, length: int, objects: ObjectRows, allocator: RangeAllocator, spare: Sequence[int] | None
    ) -> None:
        self._length = length
        self._objects = objects
        self._allocator = allocator
        self._spare = spare
        self._looks_left = min(MOST_LOOKS + 2 * (length // ALIGNMENT), MOST_LOOKS_IN_ALL)
        # The next victims, and free ranges beside them: length by offset.
        self._cheap: dict[int, int] = {}
        # Offsets at which the walk of a window was blocked, in order.
        self._barriers: list[int] = []

    def among(self, first: StoredObject, victims: Iterator[StoredObject]) -> list[StoredObject]:
        """Search ever more victims, until a window is found or the bound is reached."""
        self._add(first)
        wanted = LOOK_AHEAD * self._length
        while self._looks_left > 0:
            seen = 0
            for stored in islice(victims, self._looks_left):
                seen += rounded(stored.length)
                self._add(stored)
                if seen >= wanted or _reach(stored, self._allocator) >= self._length:
                    break
            window = self._best()
            if window or not seen:
                return window
            wanted *= 2
        return []

    def _add(self, stored: StoredObject) -> None:
        self._looks_left -= 1
        offset, length = stored.offset, rounded(stored.length)
        before, after = self._allocator.free_before(offset), self._allocator.free_at(offset + length)
        if before:
            self._cheap[offset - before] = before
        self._cheap[offset] = length
        if after:
            self._cheap[offset + length] = after

    def _best(self) -> list[StoredObject]:
        for start in self._starts():
            at = bisect_left(self._barriers, start)
            if at < len(self._barriers) and self._barriers[at] < start + self._length:
                continue
            window = self._walk(start)
            if window or self._looks_left <= 0:
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
            self._looks_left -= 1
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
