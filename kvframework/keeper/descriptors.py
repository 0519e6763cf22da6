"""The descriptors that `kvframework hold` keeps, by name."""

from __future__ import annotations

import os

from kvframework.keeper.memory import free_unused

MAX_KEPT = 16


class KeptDescriptors:
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
