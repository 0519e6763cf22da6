"""The victims of one STORE: each policy is asked for them once, however many objects it stores. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvframework.storage.l1.leases import StoredObject
from kvframework.storage.l1.rows import ObjectRows
from kvframework.storage.l1.tenants import Tenants


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
