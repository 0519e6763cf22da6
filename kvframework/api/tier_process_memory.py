"""The memory of the values that pass between a tier and its helper process: a memfd that both have mapped.

Each connection has its own, so a call that goes on behind its deadline, in a helper that is not yet dead, has nothing
to write to but memory that no other call ever gets.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Sequence

# Values begin at multiples of this, a cache line, and the memory grows by multiples of the other.
_VALUE_STEP = 64
_MEMORY_STEP = 1 << 20
# Not yet in `fcntl` of Python 3.10.
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK = 1033, 1, 2


class ValueMemory:
    """The memory of one connection. Takes over the descriptor. The server makes and extends it, before a call; the
    helper maps what it has become. One thread at a time."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None
        self.nbytes = 0

    @classmethod
    def create(cls) -> ValueMemory:
        """Make an empty one, which cannot shrink: a mapped page behind its end would be a SIGBUS. Raises
        `OSError`."""
        fd = os.memfd_create("kvf-helper-values", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_SEAL)
        return cls(fd)

    def extend(self, sizes: Sequence[int]) -> None:
        """Have room for values of these sizes. Raises `OSError` where there is no memory; blocks for the kernel's
        clearing of it."""
        if not self.has_room(sizes):
            needed = _starts(sizes)[-1]
            os.posix_fallocate(self.fd, 0, needed + -needed % _MEMORY_STEP)
            self.map()

    def has_room(self, sizes: Sequence[int]) -> bool:
        """Whether values of these sizes fit into what is mapped."""
        return _starts(sizes)[-1] <= self.nbytes

    def map(self) -> None:
        """Map all of it. Views of before stay valid, and show the same bytes. Raises `OSError`."""
        self.unmap()
        nbytes = os.fstat(self.fd).st_size
        self._map = mmap.mmap(self.fd, nbytes)
        self.nbytes = nbytes

    def all(self) -> memoryview:
        """All that is mapped."""
        return memoryview(bytearray() if self._map is None else self._map)

    def values(self, sizes: Sequence[int]) -> list[memoryview]:
        """The places of values of these sizes. Raises `ValueError` where they do not fit."""
        if not self.has_room(sizes):
            raise ValueError(f"values of {sum(sizes)} bytes in a memory of {self.nbytes}")
        memory, starts = self.all(), _starts(sizes)
        return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def close(self) -> None:
        self.unmap()
        os.close(self.fd)

    def unmap(self) -> None:
        """End the mapping, with its last view."""
        if self._map is not None:
            with contextlib.suppress(BufferError):  # the last view ends it
                self._map.close()
            self._map = None
            self.nbytes = 0


class Connection:
    """A connection for one call at a time, and the memory of its values."""

    def __init__(self, sock: socket.socket, memory: ValueMemory) -> None:
        self.sock = sock
        self.memory = memory

    @classmethod
    def through(cls, control: socket.socket) -> Connection:
        """Make one, and send its other end. Raises `OSError`."""
        sock, theirs = socket.socketpair()
        try:
            with theirs:
                memory = ValueMemory.create()
                try:
                    socket.send_fds(control, [b"c"], [theirs.fileno(), memory.fd])
                except BaseException:
                    memory.close()
                    raise
        except BaseException:
            sock.close()
            raise
        return cls(sock, memory)

    def close(self) -> None:
        self.sock.close()
        self.memory.close()


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each value begins, and where the last one ends."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += size + -size % _VALUE_STEP
    return [*starts, end]
