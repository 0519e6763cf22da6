"""The fd store of `kvframework hold`: descriptors by name, as systemd has them."""

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
    has a lock on its arena, see `storage.l1.journal`."""
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


MAX_KEPT = 16


class FdStore:
    """At most `MAX_KEPT` descriptors, owned by this object, one for each name."""

    def __init__(self) -> None:
        self._by_name: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def items(self) -> list[tuple[str, int]]:
        """The names and the descriptors, which stay owned here, the oldest name first."""
        return list(self._by_name.items())

    def put(self, name: str, fd: int) -> bool:
        """Keep `fd`, which is owned here from now on, in place of one of the same name. False, and closed, beyond
        `MAX_KEPT` names. Closing the last descriptor of a file blocks until its memory is free."""
        if name not in self._by_name and len(self._by_name) >= MAX_KEPT:
            os.close(fd)
            return False
        self.remove(name)
        self._by_name[name] = fd
        return True

    def remove(self, name: str) -> bool:
        """Close the descriptor of this name; False if there is none. Blocks as `put` does."""
        fd = self._by_name.pop(name, None)
        if fd is None:
            return False
        os.close(fd)
        return True

    def free(self) -> int | None:
        """Free the memory of all files, also for those that map them, and return its bytes; None, and none is free,
        while another process uses it. Blocks as `put` does."""
        before = self.nbytes
        return before - self.nbytes if free_unused(self._by_name.values()) else None

    def clear(self) -> None:
        """Close all. Blocks as `put` does."""
        for name in list(self._by_name):
            self.remove(name)

    @property
    def nbytes(self) -> int:
        """The memory of all files."""
        return sum(_nbytes(os.fstat(fd)) for fd in self._by_name.values())

    def report(self) -> list[dict[str, object]]:
        """Each name, the size of its file, and the bytes of memory that it has."""
        rows: list[dict[str, object]] = []
        for name, fd in self._by_name.items():
            status = os.fstat(fd)
            rows.append({"name": name, "size": status.st_size, "bytes": _nbytes(status)})
        return rows


def _nbytes(status: os.stat_result) -> int:
    return status.st_blocks * 512
