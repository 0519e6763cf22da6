"""The victims of one STORE: each policy is asked for them once, however many objects it stores, and those are chosen
that free a contiguous range. Pure; evicts nothing itself.

The policy's order decides, as far as addresses allow. The first victim is enough if its own range suffices: the usual
case, since objects of one namespace are about equal in size. Otherwise a window of the arena is chosen, of the needed
length and without pinned, reserved or quarantined ranges: of the windows that begin at one of the policy's next
victims, the one with the most bytes of such victims and of free ranges.

The bound: the chosen objects have less than twice the needed bytes, or one object alone has enough, and no tenant
loses more than it may. If there is no window, nothing is chosen. In an arena of up to some ten thousand objects all are
examined; in a larger one as many around the policy's next victims, so that the cost of a placement does not grow with
L1.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import islice

from kvframework.storage.l1.allocator import ALIGNMENT, RangeAllocator, rounded
from kvframework.storage.l1.entries import ObjectRows, StoredObject
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
