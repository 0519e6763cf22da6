"""Making a range of the arena resident, without a signal and without holding the interpreter lock.

Called from the arena's own thread only.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from kvframework.api.shared_mapping import SharedMapping

_MADV_POPULATE_WRITE = 23  # Linux 5.14

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


class Toucher:
    """Makes ranges of `segment`, which maps all of `fd`, resident. Owns neither. `kept`: the bytes stay as they are.
    `outlives`: a next server waits until the segment is unmapped at the end of this process."""

    def __init__(self, segment: SharedMapping, fd: int, *, kept: bool = False, outlives: bool = False) -> None:
        self._kept = kept
        self._outlives = outlives
        self._segment = segment
        self._fd = fd
        anchor = ctypes.c_char.from_buffer(segment.memory, segment.begin)
        self._address = ctypes.addressof(anchor)  # the anchor is not kept: it would prevent closing the mapping
        self._populates = True

    def touch(self, start: int, end: int) -> None:
        """Makes bytes `[start, end)` resident; `start` is a multiple of the page size. Blocks while the kernel clears
        the pages, without the interpreter lock. Raises `OSError` (ENOMEM, ENOSPC) if there is no memory."""
        if self._kept:
            os.posix_fallocate(self._fd, start, end - start)
            return
        if self._populates:
            self._populates = self._populate(start, end)
        if not self._populates:
            # Reserves the pages first: a write to a page that cannot be allocated would be a SIGBUS.
            os.posix_fallocate(self._fd, start, end - start)
            pages = len(range(start, end, mmap.PAGESIZE))
            with self._segment.view() as view:
                view[start : end : mmap.PAGESIZE] = bytes(pages)
        if self._outlives:
            # The pages stay in the file, but out of the page tables of this process: at its end the kernel would clear
            # them, 0.1 s a GiB, and only then tells the keeper of it.
            _madvise(self._address + start, end - start, mmap.MADV_DONTNEED)

    def _populate(self, start: int, end: int) -> bool:
        """False if the kernel does not know the advice."""
        while _madvise(self._address + start, end - start, _MADV_POPULATE_WRITE) != 0:
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                return False
            if code not in (errno.EINTR, errno.EAGAIN):
                raise OSError(code, os.strerror(code))
        return True
