"""The space in one L2 tier: what leaves a full one, and what of it writers have taken."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvframework.api.tier import PackedKey, TierEntry, TierUsage

# The choice of victims in a full L2 tier: least recently used first. Pure.


@dataclass(frozen=True)
class Watermarks:
    """Fractions of a tier's capacity: above `high`, values are deleted down to `low`."""

    high: float = 0.95
    low: float = 0.85

    def excess(self, usage: TierUsage, sizes: Iterable[int]) -> int:
        """Return the bytes to delete before values of `sizes` are written, 0 if there is space. Values larger than the
        whole tier are ignored."""
        wanted = usage.used_bytes + sum(nbytes for nbytes in sizes if nbytes <= self.high * usage.capacity_bytes)
        if wanted <= self.high * usage.capacity_bytes:
            return 0
        return max(wanted - int(self.low * usage.capacity_bytes), 0)

    def at_once(self, usage: TierUsage, sizes: Iterable[int]) -> int:
        """Return how many values, the first of `sizes`, may be written before space is made again: those that fit below
        `low`, at least one. Values larger than the whole tier take no space."""
        space, number = self.low * usage.capacity_bytes, 0
        for nbytes in sizes:
            if nbytes <= self.high * usage.capacity_bytes:
                space -= nbytes
                if space < 0 and number:
                    break
            number += 1
        return number


@dataclass(frozen=True)
class Shares:
    """The shares of a tier's capacity that its tenants have, by their numbers, 0 for all without a name: what others do
    not take from each as long as they have something to give themselves, and the most that each keeps once space is
    made. `tenant_of` returns the number for a key."""

    tenant_of: Callable[[PackedKey], int] = lambda _key: 0
    least: Sequence[float] = (0.0,)
    most: Sequence[float] = (1.0,)


def victims(entries: Iterable[TierEntry], nbytes: int, capacity: int, shares: Shares) -> list[PackedKey]:
    """Return keys with at least `nbytes` in total, if there are as many: first of tenants that have more than their
    most, then of those that have more than their least, then of any; of each the least recently used first. Memory is
    bounded by the result and one entry, for each tenant."""
    found = [_Oldest(nbytes) for _ in shares.least]
    for number, entry in enumerate(entries):
        found[shares.tenant_of(entry.key)].add(number, entry)
    left = list(heapq.merge(*[each.sorted() for each in found], key=_used_at))
    chosen: list[PackedKey] = []
    all_of_it = [math.inf] * len(found)
    for kept in (shares.most, shares.least, ()):
        spare = [each.total - share * capacity for each, share in zip(found, kept, strict=True)] if kept else all_of_it
        passed, left = left, []
        for entry in passed:
            tenant = shares.tenant_of(entry.key)
            if nbytes <= 0 or spare[tenant] <= 0:
                left.append(entry)
                continue
            nbytes -= entry.nbytes
            spare[tenant] -= entry.nbytes
            found[tenant].total -= entry.nbytes
            chosen.append(entry.key)
    return chosen


class _Oldest:
    """The least recently used entries of one tenant with `nbytes` in total, and the bytes of all of them."""

    def __init__(self, nbytes: int) -> None:
        self.total = 0
        self._nbytes = nbytes
        self._held = 0
        self._heap: list[tuple[float, int, TierEntry]] = []

    def add(self, number: int, entry: TierEntry) -> None:
        heapq.heappush(self._heap, (-_used_at(entry), number, entry))
        self.total += entry.nbytes
        self._held += entry.nbytes
        while self._heap and self._held - self._heap[0][2].nbytes >= self._nbytes:
            self._held -= heapq.heappop(self._heap)[2].nbytes

    def sorted(self) -> list[TierEntry]:
        """Return the entries, the least recently used first."""
        return [entry for _, _, entry in sorted(self._heap, reverse=True)]


def _used_at(entry: TierEntry) -> float:
    return entry.used_at or 0.0


# The space in one tier, of which several writers take at once. Pure but for its lock; thread-safe.
#
# Each writer asks the tier how full it is, then takes space. The tier's answer is older than what the others have done
# meanwhile: bytes that they write are not in it yet, and bytes that they delete still are.


class SpaceReservation(NamedTuple):
    """Space for the first `number` values: `nbytes`, to be released once they are written. The writer deletes
    `excess` bytes first."""

    number: int
    nbytes: int
    excess: int


class Space:
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

    def take(self, usage: TierUsage, sizes: Sequence[int], watermarks: Watermarks, deleted: int) -> SpaceReservation:
        """Take space for values of `sizes`, or for the first of them. `deleted` is what `asking` returned."""
        number = watermarks.at_once(usage, sizes)
        nbytes = sum(sizes[:number])
        with self._lock:
            # What another deletes makes this space as well: two that each delete all of it would empty the tier.
            left = max(usage.used_bytes - (self._condemned - deleted), 0)
            excess = watermarks.excess(TierUsage(left + self._taken, usage.capacity_bytes), sizes[:number])
            self._taken += nbytes
            self._condemned += excess
        return SpaceReservation(number, nbytes, excess)

    def deleted(self, nbytes: int) -> None:
        """Book bytes of an excess as gone, also those that stay after all."""
        with self._lock:
            self._deleted += nbytes

    def release(self, taken: SpaceReservation) -> None:
        with self._lock:
            self._taken -= taken.nbytes
