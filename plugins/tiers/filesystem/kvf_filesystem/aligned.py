"""Direct I/O (O_DIRECT): the buffers that qualify, and the copied pages at their two ends. Runs in the caller's thread.

The bulk of a value moves straight between the disk and the caller's memory, where it must begin on a page boundary, as
it does in the file. The head, small parts at the front and the last partial page are copied through pages of this
module.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

from kvf_filesystem.form import HEAD_BYTES, PAGE, lead_bytes, pack_head, start_for, start_in
from kvf_filesystem.moving import Vectored, move

# The kernel's errors where a file system, or the required alignment, does not allow direct I/O.
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class AlignedValue:
    """The parts of one value as views for direct I/O. Borrows the parts."""

    def __init__(self, lead: Sequence[memoryview], bulk: Sequence[memoryview], nbytes: int) -> None:
        self._lead = lead
        self._nbytes = nbytes
        self._start = start_for(nbytes, sum(part.nbytes for part in lead))
        front = self._start + sum(part.nbytes for part in lead)
        tail = bulk[-1].nbytes % PAGE
        pages = memoryview(mmap.mmap(-1, front + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._front, self._page = pages[:front], pages[front:]
        self._tail = bulk[-1][bulk[-1].nbytes - tail :]
        self._views = [self._front, *bulk[:-1], bulk[-1][: bulk[-1].nbytes - tail]]
        if tail:
            self._views.append(self._page)

    def write(self, fd: int, check: Callable[[], None]) -> bool:
        """Writes head and value at the beginning of the file; False if the kernel refuses direct I/O: then any part may
        have been written. Raises `OSError`."""
        self._front[:HEAD_BYTES] = pack_head(self._start, self._nbytes)
        offset = self._start
        for part in self._lead:
            self._front[offset : offset + part.nbytes] = part
            offset += part.nbytes
        self._page[: self._tail.nbytes] = self._tail
        return self._move(os.pwritev, fd, check)

    def read(self, fd: int, check: Callable[[], None]) -> bool:
        """Reads head and value; False if the kernel refuses direct I/O, or the value does not begin at the offset that
        these parts need: the parts then hold undefined bytes. Raises `OSError`."""
        if not self._move(os.preadv, fd, check):
            return False
        if start_in(bytes(self._front[:HEAD_BYTES]), self._nbytes) != self._start:
            return False
        offset = self._start
        for part in self._lead:
            part[:] = self._front[offset : offset + part.nbytes]
            offset += part.nbytes
        self._tail[:] = self._page[: self._tail.nbytes]
        return True

    def _move(self, operation: Vectored, fd: int, check: Callable[[], None]) -> bool:
        enough = self._start + self._nbytes
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
            moved = move(operation, fd, self._views, check, enough=enough)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            moved = 0
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        return moved >= enough


def align(parts: Sequence[memoryview], nbytes: int) -> AlignedValue | None:
    """The value of `parts` (of bytes, none empty, `nbytes` together); None if their memory is not aligned for direct
    I/O."""
    lead, index = lead_bytes(parts), 0
    while index < len(parts) and parts[index].nbytes < PAGE:
        index += 1
    bulk = parts[index:]
    if not bulk or lead > PAGE or any(_address(part) % PAGE for part in bulk):
        return None
    if any(part.nbytes % PAGE for part in bulk[:-1]):
        return None
    return AlignedValue(parts[:index], bulk, nbytes)


def _address(view: memoryview) -> int:
    """The address of the view; 1, which is not aligned, for read-only memory, whose address Python does not give."""
    return 1 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))
