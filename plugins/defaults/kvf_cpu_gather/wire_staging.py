"""Host memory in which gathered objects wait until the server has answered for them. Engine side, one thread."""

from __future__ import annotations

import contextlib
import mmap


class Staging:
    """Pieces of memory of one size, allocated on demand and kept for the next store, `count` at most.

    A piece that was taken and is not given back is simply forgotten: a remaining reader keeps it alive.
    """

    def __init__(self) -> None:
        self._size = 0
        self._free: list[memoryview] = []

    def take(self, nbytes: int) -> memoryview:
        """Return a writable piece of at least `nbytes`, with any content."""
        if nbytes > self._size:
            self._size = nbytes
            self._free.clear()
        if self._free:
            return self._free.pop()
        memory = mmap.mmap(-1, self._size)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(memory)

    def give_back(self, piece: memoryview) -> None:
        """Take back a piece that has no reader any more."""
        if piece.nbytes == self._size:
            self._free.append(piece)

    def close(self) -> None:
        self._free.clear()
