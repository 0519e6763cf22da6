"""The end of the memory of files without a name, also where processes still map them."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Collection


def free_memory(fd: int) -> None:
    """Free the memory of a file, which also those that map it lose. A file with a name is a stranger's: it stays. So
    does one of reserved huge pages, while a process maps it: an engine in the midst of a copy would end by SIGBUS once
    the next server has taken them. Blocks until it is free."""
    if os.fstat(fd).st_nlink or os.fstatvfs(fd).f_bsize > mmap.PAGESIZE:
        return
    with contextlib.suppress(OSError, ValueError), mmap.mmap(fd, 0) as memory:
        memory.madvise(mmap.MADV_REMOVE)


def free_unused(descriptors: Collection[int]) -> bool:
    """Free the memory of files as `free_memory` does. False, and nothing is freed, while a server uses one of them: it
    has a lock on its arena, see `storage.l1.journal.arena_locks`."""
    files = [fd for fd in descriptors if not os.fstat(fd).st_nlink]
    with contextlib.ExitStack() as stack:
        for fd in files:
            try:
                own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, own)
                fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
        for fd in files:
            free_memory(fd)
    return True
