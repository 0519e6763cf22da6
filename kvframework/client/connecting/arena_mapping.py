"""An engine process's mapping of the server's arena."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import threading
import time
import weakref

from kvframework.api.shared_mapping import map_shared
from kvframework.client.connecting.resident_pages import map_ahead
from kvframework.messaging.descriptors import close_after_fork


class MappedArena:
    """The mapping of a memfd that came over the liveness socket. Owns both descriptors.

    There is no call to unmap it: each copy holds a reference to `view` (a tensor made from it does), and the mapping
    ends with the last one. Until then `alive_fd` (a copy of the liveness socket) stays open, so the server cannot take
    this process for dead and give a range to another client while it is still written here. What only maps pages ahead
    holds `mapping`, and the session may end under it.

    Forked children do not inherit the memory, and close the arena's descriptors, so that the end of this process is the
    end of all its writes, and of its locks on what it may write.
    """

    def __init__(self, arena_fd: int, alive_fd: int | None) -> None:
        # Of the monotonic clock: the session is older than that.
        self.since = time.monotonic()
        try:
            status = os.fstat(arena_fd)
            mapping = map_shared(arena_fd, status.st_size)
            reserved = os.fstatvfs(arena_fd).f_bsize > mmap.PAGESIZE
            mapping.memory.madvise(mmap.MADV_DONTFORK)
        except BaseException:
            if alive_fd is not None:
                os.close(alive_fd)
            raise
        finally:
            os.close(arena_fd)
        written = (ctypes.c_char * mapping.nbytes).from_buffer(mapping.memory, mapping.begin)
        self._writers = _Writers(mapping.memory, (status.st_dev, status.st_ino), alive_fd)
        # At the process's end the kernel closes it, after the last thread that could write has ended.
        weakref.finalize(written, self._writers.ended).atexit = False
        self.mapping = mapping
        self.view = memoryview(written).cast("B")
        self._ahead = threading.Lock()
        if reserved:
            # `mincore` does not tell what is resident of reserved huge pages, and there is next to nothing to gain.
            self._ahead.acquire()

    @property
    def is_served(self) -> bool:
        """Whether the server still has the session for which it was mapped: once that has ended, the server has closed
        its end of the liveness socket, before anything that the session held."""
        if self._writers.alive_fd is None:
            return False
        poll = select.poll()
        poll.register(self._writers.alive_fd, select.POLLIN)
        return not poll.poll(0)

    def map_ahead(self) -> None:
        """Map the resident pages in the background, once. Never blocks."""
        if self._ahead.acquire(blocking=False):
            map_ahead(self)


class _Writers:
    """What lasts as long as anything that can write the memory, the arena's own object or a copy that outlives it."""

    def __init__(self, memory: mmap.mmap, file: tuple[int, int], alive_fd: int | None) -> None:
        self.alive_fd = alive_fd
        self._memory = memory
        self._file = file
        close_after_fork(self)

    def ended(self) -> None:
        if self.alive_fd is not None:
            os.close(self.alive_fd)

    def close_in_child(self) -> None:
        """Leave the memory mapped in a forked child: its addresses may belong to other mappings by now, so it must
        never be unmapped there."""
        alive_fd, self.alive_fd = self.alive_fd, None
        if alive_fd is not None:
            os.close(alive_fd)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
        # Among them the one of the mapping object, which lasts from here on.
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                status = os.fstat(fd)
                if (status.st_dev, status.st_ino) == self._file:
                    os.close(fd)
