"""Owns an engine process's mapping of the server's arena."""

from __future__ import annotations

import contextlib
import mmap
import os


class MappedArena:
    """Maps a memfd that came over the liveness socket; takes the fd over and closes it.

    Forked children do not inherit the mapping, so that the end of this process is the end of all its writes.
    """

    def __init__(self, fd: int) -> None:
        try:
            self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmaps, or leaves it to the last tensor that still looks into the arena."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()
