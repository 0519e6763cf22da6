"""The allocator of the arena: which ranges of its bytes are free. Best fit with coalescing, pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

ALIGNMENT = 4096


class RangeAllocator:
    """Allocates `(offset, length)` ranges of mixed sizes, aligned to 4 KiB. It starts empty; `grow` adds bytes that the
    L1 memory has made resident. The caller keeps the lengths, and frees a range as it was allocated."""

    def __init__(self) -> None:
        self.limit = 0
        self.free_bytes = 0
        # No byte behind it has been allocated.
        self.reached = 0
        # The free ranges: (length, offset) in order, and by where they begin and end.
        self._by_size: list[tuple[int, int]] = []
        self._length_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}

    def grow(self, limit: int) -> None:
        """Add bytes up to `limit`; a limit below the current one is ignored."""
        limit -= limit % ALIGNMENT
        if limit > self.limit:
            start, self.limit = self.limit, limit
            self.free(start, limit - start)

    def restore(self, gaps: Sequence[tuple[int, int]], end: int) -> None:
        """Begin with what an earlier server has allocated: all bytes up to `end` except `gaps`, (offset, length), of
        which none touches another. The allocator is empty before."""
        self.limit = self.reached = end
        self.free_bytes = sum(length for _, length in gaps)
        self._by_size = sorted((length, offset) for offset, length in gaps)
        self._length_at = dict(gaps)
        self._start_of_end = {offset + length: offset for offset, length in gaps}

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a free range of at least `nbytes`, or None. The smallest sufficient range is split."""
        length = rounded(nbytes)
        at = bisect_left(self._by_size, (length, 0))
        if at == len(self._by_size):
            return None
        size, offset = self._by_size[at]
        self._take(offset, size, at)
        if size > length:
            self._insert(offset + length, size - length)
        if offset + length > self.reached:
            self.reached = offset + length
        return offset

    def take(self, start: int, end: int) -> list[tuple[int, int]]:
        """Allocate what is free of the bytes `[start, end)`; return its ranges, (offset, length)."""
        taken = []
        for offset, length in list(self._length_at.items()):
            first, last = max(offset, start), min(offset + length, end)
            if first < last:
                self._take(offset, length)
                taken.append((first, last - first))
                if offset < first:
                    self._insert(offset, first - offset)
                if last < offset + length:
                    self._insert(last, offset + length - last)
        return taken

    def free(self, offset: int, nbytes: int) -> None:
        """Free a range, with the length of its allocation, and merge it with its free neighbours."""
        length = rounded(nbytes)
        before = self._start_of_end.get(offset)
        if before is not None:
            size = offset - before
            self._take(before, size)
            offset, length = before, length + size
        after = self._length_at.get(offset + length)
        if after is not None:
            self._take(offset + length, after)
            length += after
        self._insert(offset, length)

    def free_at(self, offset: int) -> int:
        """Return the length of the free range that begins here, 0 for none."""
        return self._length_at.get(offset, 0)

    def free_before(self, offset: int) -> int:
        """Return the length of the free range that ends here, 0 for none."""
        return offset - self._start_of_end.get(offset, offset)

    @property
    def largest_free(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def fragmentation(self) -> float:
        """0.0 when all free bytes are one range, closer to 1.0 the more they are scattered."""
        return 1.0 - self.largest_free / self.free_bytes if self.free_bytes else 0.0

    def _insert(self, offset: int, length: int) -> None:
        insort(self._by_size, (length, offset))
        self._length_at[offset] = length
        self._start_of_end[offset + length] = offset
        self.free_bytes += length

    def _take(self, offset: int, length: int, at: int | None = None) -> None:
        del self._by_size[bisect_left(self._by_size, (length, offset)) if at is None else at]
        del self._length_at[offset]
        del self._start_of_end[offset + length]
        self.free_bytes -= length


def rounded(nbytes: int) -> int:
    """Return the bytes that `nbytes` occupy in the arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
