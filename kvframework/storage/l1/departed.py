"""What left L1 and the eviction policies do not know yet. Pure.

A policy must not be called while its victims are walked, so the objects of one STORE leave first, and the policies
learn of all of them afterwards, at once.
"""

from __future__ import annotations

from kvframework.api.eviction import Why
from kvframework.storage.l1.ghosts import LAST_EVICTION, Cause
from kvframework.storage.l1.leases import StoredObject
from kvframework.storage.l1.tenants import Tenants


class Departed:
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

    def tell(self) -> None:
        """Tell the policies."""
        if self._evicted:
            evicted, self._evicted = self._evicted, []
            self._tenants.removed(evicted, "evicted")
        if self._others:
            others, self._others = self._others, []
            why: Why
            for why in ("cleared", "removed"):
                self._tenants.removed([stored for stored, reason in others if reason == why], why)
