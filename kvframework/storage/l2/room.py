"""The room in one tier, of which several writers take at once. Pure but for its lock; thread-safe.

Each writer asks the tier how full it is, then takes room. The tier's answer is older than what the others have done
meanwhile: bytes that they write are not in it yet, and bytes that they delete still are.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvframework.api.tier import TierUsage
from kvframework.storage.l2.full_tier_victims import Watermarks


class Taken(NamedTuple):
    """Room for the first `number` values: `nbytes`, to be given back once they are written. The writer deletes
    `excess` bytes first."""

    number: int
    nbytes: int
    excess: int


class Room:
    """Bytes that writers have taken and not given back, and bytes that they delete. `asking` comes before the question
    how full the tier is, `take` after its answer."""

    def __init__(self) -> None:
        self._taken = 0
        self._condemned = 0
        self._deleted = 0
        self._lock = threading.Lock()

    def asking(self) -> int:
        """Return the bytes deleted up to now, for `take`."""
        with self._lock:
            return self._deleted

    def take(self, usage: TierUsage, sizes: Sequence[int], watermarks: Watermarks, deleted: int) -> Taken:
        """Take room for values of `sizes`, or for the first of them. `deleted` is what `asking` returned."""
        number = watermarks.at_once(usage, sizes)
        nbytes = sum(sizes[:number])
        with self._lock:
            # What another deletes makes this room as well: two that each delete all of it would empty the tier.
            left = max(usage.used_bytes - (self._condemned - deleted), 0)
            excess = watermarks.excess(TierUsage(left + self._taken, usage.capacity_bytes), sizes[:number])
            self._taken += nbytes
            self._condemned += excess
        return Taken(number, nbytes, excess)

    def deleted(self, nbytes: int) -> None:
        """Book bytes of an excess as gone, also those that stay after all."""
        with self._lock:
            self._deleted += nbytes

    def give_back(self, taken: Taken) -> None:
        with self._lock:
            self._taken -= taken.nbytes
