"""The arena's mapping beside forks: a child neither shows that its parent lives, nor loses memory of its own."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import select
import socket
from collections.abc import Iterator

import pytest

from kvframework.client.arena_mapping import MappedArena

SIZE = 8 << 20
ONLY_WHERE_FREE = 0x100000  # MAP_FIXED_NOREPLACE

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("arena")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def holds(file: os.stat_result) -> bool:
    """Whether this process has a descriptor of the file."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            if os.path.samestat(os.fstat(int(fd)), file):
                return True
    return False


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("outlives", [False, True], ids=["the arena", "a copy that outlives the arena"])
def test_a_forked_child_has_nothing_of(file: int, outlives: bool) -> None:
    """A connection that has ended leaves the copies that are under way: a store of an engine that forks just then."""
    server, client = socket.socketpair()
    arena = MappedArena(os.dup(file), client.detach())
    at = ctypes.addressof(ctypes.c_char.from_buffer(arena.view))
    held: list[object] = [arena.view[:16]] if outlives else [arena, arena.view[:16]]
    del arena
    status = os.fstat(file)
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        try:
            server.close()
            assert not holds(status)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | ONLY_WHERE_FREE
            assert _mmap(at, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == at
            os.write(ready[1], b"x")
            os.read(go_on[0], 1)
            held.clear()
            gc.collect()
            ctypes.memset(at, 1, SIZE)
            os._exit(0)
        finally:
            os._exit(1)
    with server:
        os.close(ready[1])
        assert os.read(ready[0], 1), "the child holds the arena's descriptor, or has its memory"
        assert not select.select([server], [], [], 0)[0]
        held.clear()
        ended = bool(select.select([server], [], [], 0)[0])
        os.write(go_on[1], b"x")
        assert os.waitpid(child, 0)[1] == 0, "the child lost memory of its own"
        assert ended, "the child shows that its parent lives"
    for fd in (ready[0], *go_on):
        os.close(fd)
