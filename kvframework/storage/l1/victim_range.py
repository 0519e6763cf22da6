"""The choice of victims in L1 that frees a contiguous range. Pure; evicts nothing itself.

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
from kvframework.storage.l1.leases import StoredObject
from kvframework.storage.l1.rows import ObjectRows

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
