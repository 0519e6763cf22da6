"""The mapping of a shared file at an address where huge pages can be mapped, for the arena in server and engines.

A huge page is mapped as one only where address and offset in the file are both multiples of its size; the kernel
itself aligns a file in memory only where huge pages are on for all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from pathlib import Path
from typing import NamedTuple

from kvframework.api.copying import address_of

__all__ = ["SharedMapping", "huge_page_bytes", "map_shared"]

_USUAL_BYTES = 2 << 20
_MAP_FIXED = 0x10

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


class SharedMapping(NamedTuple):
    """All of a file, from byte `begin` of `memory` on. The mapping ends with `memory`, whose `close` raises
    `BufferError` while there are views."""

    memory: mmap.mmap
    begin: int
    nbytes: int

    def view(self) -> memoryview:
        """A new writable view of the file's bytes."""
        with memoryview(self.memory) as whole:
            return whole[self.begin : self.begin + self.nbytes]

    def advise(self, advice: int) -> None:
        """Calls madvise(2) on the file's bytes. Raises `OSError`."""
        self.memory.madvise(advice, self.begin, self.nbytes)


@functools.cache
def huge_page_bytes(sysfs: Path = Path("/sys")) -> int:
    """The size of a transparent huge page of this kernel, the usual one where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        return int((sysfs / "kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    return _USUAL_BYTES


def map_shared(fd: int, nbytes: int) -> SharedMapping:
    """Map the first `nbytes` of a file, shared and writable; `fd` stays the caller's, and may be closed. Raises
    `OSError`, `ValueError` and `OverflowError` as `mmap.mmap`."""
    huge = huge_page_bytes()
    # A file of reserved huge pages the kernel aligns by itself.
    if nbytes >= huge > os.fstatvfs(fd).f_bsize:
        # Address space only, of which the aligned part becomes the file's.
        with contextlib.suppress(OSError, ValueError, OverflowError):
            room = mmap.mmap(-1, nbytes + huge, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with address_of(memoryview(room), True) as (address, _):
                begin = -address % huge
                flags = mmap.MAP_SHARED | _MAP_FIXED
                at = _mmap(address + begin, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
            if at == address + begin:
                return SharedMapping(room, begin, nbytes)
    return SharedMapping(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE), 0, nbytes)
