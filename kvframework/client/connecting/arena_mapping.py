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
from kvframework.messaging.fork import close_after_fork


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
        self._alive_fd = alive_fd
        try:
            status = os.fstat(arena_fd)
            mapping = map_shared(arena_fd, status.st_size)
            reserved = os.fstatvfs(arena_fd).f_bsize > mmap.PAGESIZE
        except BaseException:
            if alive_fd is not None:
                os.close(alive_fd)
            raise
        finally:
            os.close(arena_fd)
        mapping.memory.madvise(mmap.MADV_DONTFORK)
        written = (ctypes.c_char * mapping.nbytes).from_buffer(mapping.memory, mapping.begin)
        self._end = weakref.finalize(written, os.close, alive_fd) if alive_fd is not None else None
        if self._end is not None:
            # At the process's end the kernel closes it, after the last thread that could write has ended.
            self._end.atexit = False
        self._file = status.st_dev, status.st_ino
        self.mapping = mapping
        self.view = memoryview(written).cast("B")
        self._ahead = threading.Lock()
        if reserved:
            # `mincore` does not tell what is resident of reserved huge pages, and there is next to nothing to gain.
            self._ahead.acquire()
        close_after_fork(self)

    @property
    def is_served(self) -> bool:
        """Whether the server still has the session for which it was mapped: once that has ended, the server has closed
        its end of the liveness socket, before anything that the session held."""
        if self._alive_fd is None:
            return False
        poll = select.poll()
        poll.register(self._alive_fd, select.POLLIN)
        return not poll.poll(0)

    def map_ahead(self) -> None:
        """Map the resident pages in the background, once. Never blocks."""
        if self._ahead.acquire(blocking=False):
            map_ahead(self)

    def close_in_child(self) -> None:
        """Leave the memory mapped in a forked child: its addresses may belong to other mappings by now, so it must
        never be unmapped there."""
        if self._end is not None and self._end.detach() and self._alive_fd is not None:
            os.close(self._alive_fd)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.mapping.memory))
        # Among them the one of the mapping object, which lasts from here on.
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                status = os.fstat(fd)
                if (status.st_dev, status.st_ino) == self._file:
                    os.close(fd)
