"""The tenants of L1: whose an object is, what each tenant holds, and which objects may leave for whom. Pure.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import msgspec

from kvframework.api.eviction import EvictionPolicy, RequestFacts, Why
from kvframework.api.keys import NAMESPACE_BYTES, SALT_BYTES, PackedKey
from kvframework.storage.l1.allocator import rounded
from kvframework.storage.l1.leases import StoredObject
from kvframework.storage.l1.rows import ObjectRows

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

    def room(self, tenant: int, limit: int) -> float:
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
            told = msgspec.structs.replace(facts, tenant=self.names[tenant], held=self.used[tenant])
            self._accessed(tenant, own, told)

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
