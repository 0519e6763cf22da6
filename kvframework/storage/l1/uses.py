"""Reports of uses to the eviction policy: few uses at once, many in batches. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvframework.api.eviction import RequestFacts
from kvframework.storage.l1.leases import StoredObject
from kvframework.storage.l1.rows import ObjectRows
from kvframework.storage.l1.tenants import Tenants

# Uses that are reported to the policy in one call: a millisecond or two; and the number of batches that may wait.
TELL_AT_ONCE = 1 << 13
MOST_UNTOLD = 16


class Uses:
    """Waiting uses. Those of objects that have left meanwhile are skipped."""

    def __init__(self, tenants: Tenants, objects: ObjectRows) -> None:
        self._tenants = tenants
        self._objects = objects
        # Batches of uses too large to report at once, oldest first, each in the order of the policy's calls.
        self._untold: deque[tuple[list[StoredObject], RequestFacts]] = deque()

    def add(self, objects: list[StoredObject], facts: RequestFacts) -> None:
        """Report uses of objects, given in the order of a prompt; the policy receives the end of the prompt first."""
        if len(objects) <= TELL_AT_ONCE:
            self._tenants.accessed(objects[::-1], facts)
            return
        if len(self._untold) == MOST_UNTOLD:
            self._tell(*self._untold.popleft())
        self._untold.append((objects[::-1], facts))

    def tell_some(self) -> None:
        """Report some of the waiting uses to the policy, `TELL_AT_ONCE` at most."""
        if self._untold:
            batch, facts = self._untold.popleft()
            if len(batch) > TELL_AT_ONCE:
                self._untold.appendleft((batch[TELL_AT_ONCE:], facts))
            self._tell(batch[:TELL_AT_ONCE], facts)

    def _tell(self, used: Sequence[StoredObject], facts: RequestFacts) -> None:
        here = [stored for stored in used if self._objects.get(stored.key) is stored]
        for first in range(0, len(here), TELL_AT_ONCE):
            self._tenants.accessed(here[first : first + TELL_AT_ONCE], facts)
