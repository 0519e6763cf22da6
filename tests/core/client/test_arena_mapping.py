"""The arena's mapping: its pages are mapped ahead, those that the file has, no others, and only while it is mapped. A
forked child neither shows that its parent lives, nor loses memory of its own."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import re
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework.client import arena_mapping
from kvframework.client.arena_mapping import MappedArena

MIB = 1 << 20
SIZE = 9 * MIB + mmap.PAGESIZE
ONLY_WHERE_FREE = 0x100000  # MAP_FIXED_NOREPLACE

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


@pytest.fixture(autouse=True)
def one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_mapping, "_PAUSES_S", [0.0])


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("arena")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def mapped_bytes(file: int) -> int:
    """What the page tables of this process have of the file."""
    parts = Path("/proc/self/smaps").read_text().split("VmFlags:")
    own = [part for part in parts if f" {os.fstat(file).st_ino} " in part]
    return sum(int(kib) * 1024 for part in own for kib in re.findall(r"^Rss: +(\d+) kB$", part, re.MULTILINE))


def allocated_bytes(file: int) -> int:
    return os.fstat(file).st_blocks * 512


def ended() -> None:
    for thread in threading.enumerate():
        if thread.name == "kvf-map-ahead":
            thread.join()


def test_only_what_the_file_has_is_mapped_and_nothing_is_allocated(file: int) -> None:
    os.pwrite(file, bytes(3 * MIB), MIB)
    os.pwrite(file, b"the last page", SIZE - mmap.PAGESIZE)
    held = allocated_bytes(file)
    arena = MappedArena(os.dup(file), None)
    assert mapped_bytes(file) == 0
    arena.map_ahead()
    ended()
    assert mapped_bytes(file) == held == allocated_bytes(file) == 3 * MIB + mmap.PAGESIZE
    assert bytes(arena.view[-mmap.PAGESIZE :][:13]) == b"the last page"


def test_what_becomes_resident_later_is_mapped_later(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = iter([lambda: None, lambda: os.pwrite(file, bytes(SIZE), 0), lambda: None])
    arena = MappedArena(os.dup(file), None)
    monkeypatch.setattr(arena_mapping, "_PAUSES_S", (next(passes)() for _ in range(3)))
    monkeypatch.setattr(arena_mapping.time, "sleep", lambda _: None)
    arena.map_ahead()
    ended()
    assert mapped_bytes(file) == SIZE == arena.view.nbytes


def test_the_end_of_the_arena_ends_it(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread refers to the mapping only during a step: afterwards nothing of it is left."""
    rests, go = threading.Event(), threading.Event()

    def rest(_: float) -> None:
        rests.set()
        go.wait()

    monkeypatch.setattr(arena_mapping.time, "sleep", rest)
    os.pwrite(file, bytes(SIZE), 0)
    arena = MappedArena(os.dup(file), None)
    arena.map_ahead()
    rests.wait()
    del arena
    assert mapped_bytes(file) == 0
    go.set()
    ended()


def test_a_step_under_way_does_not_delay_the_end_of_the_session(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine its thread waits for its turn: a client that was closed, and opened again, found its own
    instance registered by its former session."""
    steps, go = threading.Event(), threading.Event()

    def no_turn(*_: int) -> int:
        steps.set()
        go.wait()
        return 0

    monkeypatch.setattr(arena_mapping, "_madvise", no_turn)
    os.pwrite(file, bytes(SIZE), 0)
    server, client = socket.socketpair()
    with server:
        arena = MappedArena(os.dup(file), client.detach())
        kept = arena.view[:1]
        arena.map_ahead()
        steps.wait()
        del arena
        assert not select.select([server], [], [], 0)[0], "the session ended before the last copy"
        kept.release()
        try:
            assert select.select([server], [], [], 0)[0], "the session goes on"
            assert server.recv(1) == b""
        finally:
            go.set()
            ended()


def test_without_room_for_page_tables_nothing_is_mapped(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.pwrite(file, bytes(SIZE), 0)
    monkeypatch.setattr(arena_mapping, "available_memory", lambda: arena_mapping._ROOM - 1)
    arena = MappedArena(os.dup(file), None)
    arena.map_ahead()
    ended()
    assert mapped_bytes(file) == 0
    assert arena.view.nbytes == SIZE


@pytest.mark.parametrize("call", ["_madvise", "_mincore"])
def test_a_kernel_that_refuses_leaves_it_to_the_copies(file: int, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: object) -> int:
        arena_mapping.ctypes.set_errno(errno.EINVAL)
        return -1

    os.pwrite(file, bytes(SIZE), 0)
    monkeypatch.setattr(arena_mapping, call, refuse)
    arena = MappedArena(os.dup(file), None)
    arena.map_ahead()
    ended()
    assert mapped_bytes(file) == 0
    arena.view[5] = 7


def test_without_a_thread_it_is_left_to_the_copies(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    MappedArena(os.dup(file), None).map_ahead()


def holds(file: os.stat_result) -> bool:
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
