"""The kit over memory of L1 that is wrong in one way each: a line of `BUGS` is a class of tests, and one must fail.
Run by pytest outside of the repository."""
# ruff: noqa: ARG005, E501  the arguments are those of the contract

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from multiprocessing import shared_memory  # noqa: F401  its tracker is a thread of this process from now on
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvf_dev.testing import MemoryConformance
from kvframework.api.memory import ArenaError, Memory

STEP = 4 << 20
KEPT: list[Any] = []
OnReady = Callable[[int], None]


class Right(Memory):
    flags = os.MFD_CLOEXEC
    _thread: threading.Thread | None = None

    def __init__(self, capacity: int, kept: int = -1) -> None:
        self.capacity = capacity
        self.fd = kept
        self.kept = kept >= 0
        try:
            if not self.kept:
                self.fd = self.opened()
            elif os.fstat(kept).st_size != capacity:
                raise ValueError("the kept memory has another size")
            self._map = self.mapped()
        except (OSError, ValueError, OverflowError) as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise ArenaError(f"{capacity} bytes of memory cannot be had: {error}") from error
        self._closing = threading.Event()

    def opened(self) -> int:
        fd = os.memfd_create("kit", self.flags)
        os.ftruncate(fd, self.capacity)
        return fd

    def mapped(self) -> mmap.mmap:
        return mmap.mmap(self.fd, self.capacity)

    def start(self, on_ready: OnReady) -> None:
        self._thread = threading.Thread(target=self.work, args=(on_ready,))
        self._thread.start()

    def work(self, on_ready: OnReady) -> None:
        start = 0
        for end in self.ends():
            if self._closing.is_set():
                return
            self.take(start, end)
            on_ready(end)
            start = end

    def ends(self) -> list[int]:
        return [*range(STEP, self.capacity, STEP), self.capacity]

    def take(self, start: int, end: int) -> None:
        os.posix_fallocate(self.fd, 0, max(end, 1))

    def view(self) -> memoryview:
        return memoryview(self._map)

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self.fd >= 0:
            self._map.close()
            os.close(self.fd)
            self.fd = -1


class TestRightMemory(MemoryConformance):
    @pytest.fixture
    def make_memory(self) -> type[Right]:
        return Right

    @pytest.fixture
    def make_kept_memory(self) -> type[Right]:
        return Right


class TestNoMemory(MemoryConformance):
    pass


# how it is made


def _unregistered(self: Right, capacity: int) -> None:
    try:
        Right.__init__(self, capacity)
    except ArenaError as error:
        raise OSError(12, "no memory") from error


def _leaking(self: Right, capacity: int) -> None:
    other = os.memfd_create("config")
    Right.__init__(self, capacity)
    os.close(other)


def _larger(self: Right, capacity: int) -> None:
    Right.__init__(self, capacity)
    self.capacity += 4096


def _smaller(self: Right, capacity: int) -> None:
    Right.__init__(self, capacity // STEP * STEP or 4096)


def _inherited(self: Right, capacity: int) -> None:
    Right.__init__(self, capacity)
    os.set_inheritable(self.fd, True)


class OneForAll(Right):
    """Attaches to what is there under the name."""

    shared: ClassVar[list[int]] = []

    def opened(self) -> int:
        if not self.shared:
            self.shared.append(super().opened())
        return os.dup(self.shared[0])


def _opened_by_name(self: Right) -> int:
    # The bug leaves a name: the end of this process takes it away, so that no other test meets it.
    path = f"/dev/shm/kvf-kit-{os.getpid()}-{id(self)}"
    atexit.register(Path(path).unlink, missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, self.capacity)
    return fd


class ToRead(Right):
    """The descriptor that clients get."""

    def opened(self) -> int:
        self.writable = super().opened()
        return os.open(f"/proc/self/fd/{self.writable}", os.O_RDONLY | os.O_CLOEXEC)

    def mapped(self) -> mmap.mmap:
        return mmap.mmap(self.writable, self.capacity)


class OneView(Right):
    one: memoryview | None = None

    def view(self) -> memoryview:
        self.one = self.one or super().view()
        return self.one

    def close(self) -> None:
        if self.one is not None:
            self.one.release()
        super().close()


# what is made of memory that is kept


def _ignores(self: Right, capacity: int, kept: int = -1) -> None:
    Right.__init__(self, capacity)
    if kept >= 0:
        os.close(kept)


def _copies(self: Right, capacity: int, kept: int = -1) -> None:
    Right.__init__(self, capacity)
    if kept >= 0:
        with mmap.mmap(kept, capacity) as old:
            self._map[:] = old[:]
        os.close(kept)


def _duplicates(self: Right, capacity: int, kept: int = -1) -> None:
    Right.__init__(self, capacity, os.dup(kept) if kept >= 0 else -1)


def _leaks(self: Right, capacity: int, kept: int = -1) -> None:
    if kept >= 0 and os.fstat(kept).st_size != capacity:
        raise ArenaError("the kept memory has another size")
    Right.__init__(self, capacity, kept)


def _grows(self: Right, capacity: int, kept: int = -1) -> None:
    if kept >= 0:
        os.ftruncate(kept, capacity)
    Right.__init__(self, capacity, kept)


def _lets_children_inherit(self: Right, capacity: int, kept: int = -1) -> None:
    Right.__init__(self, capacity, kept)
    os.set_inheritable(self.fd, self.kept)


def _mapped_privately(self: Right) -> mmap.mmap:
    return mmap.mmap(self.fd, self.capacity, flags=mmap.MAP_PRIVATE if self.kept else mmap.MAP_SHARED)


def _cleared_if_kept(self: Right, on_ready: OnReady) -> None:
    if self.kept:
        self._map[: self.capacity // 2] = bytes(self.capacity // 2)
    Right.work(self, on_ready)


# how it becomes usable


def _two_workers(self: Right, on_ready: OnReady) -> None:
    begin = threading.Barrier(2)

    def work(end: int) -> None:
        self.take(0, end)
        begin.wait(5)
        on_ready(end)

    both = [threading.Thread(target=work, args=(end,)) for end in (self.capacity // 2 // STEP * STEP, self.capacity)]
    for thread in both:
        thread.start()
    self._thread = threading.Thread(target=lambda: [thread.join() for thread in both])
    self._thread.start()


def _wait(self: Right, on_ready: OnReady) -> None:
    Right.start(self, on_ready)
    assert self._thread is not None
    self._thread.join()


def _moved(self: Right, on_ready: OnReady) -> None:
    KEPT.append(self._map)
    self._map = mmap.mmap(-1, self.capacity)
    os.posix_fallocate(self.fd, 0, self.capacity)
    Right.start(self, on_ready)


def _cleared(self: Right, start: int, end: int) -> None:
    Right.take(self, start, end)
    low = max(start - 1, 0)
    self._map[low:end] = bytes(end - low)


def _cleared_at_the_end(self: Right, on_ready: OnReady) -> None:
    for end in self.ends()[:-1]:
        self.take(0, end)
        on_ready(end)
    self._map[:] = bytes(self.capacity)
    on_ready(self.capacity)


def _reported_first(self: Right, on_ready: OnReady) -> None:
    for end in self.ends():
        on_ready(end)
        self.take(0, end)


def _never_taken_last(self: Right, start: int, end: int) -> None:
    if end != self.capacity:
        Right.take(self, start, end)


def _from_the_end(self: Right, start: int, end: int) -> None:
    os.posix_fallocate(self.fd, self.capacity - end, end - start)


# how it ends


class ClosesLate(Right):
    def start(self, on_ready: OnReady) -> None:
        threading.Thread(target=lambda: [on_ready(end) for end in self.ends()], daemon=True).start()


def _not_joined(self: Right) -> None:
    self._thread = None
    Right.close(self)


def _closed_by_force(self: Right) -> None:
    number = self.fd
    Right.close(self)
    self.number = number if number >= 0 else self.number
    if number < 0:
        with contextlib.suppress(OSError):
            os.close(self.number)


def _mapping_kept(self: Right) -> None:
    KEPT.append(self._map)
    self._map = mmap.mmap(-1, 1)
    Right.close(self)


def _fd_kept(self: Right) -> None:
    if self.fd >= 0:
        KEPT.append(os.dup(self.fd))
    Right.close(self)


def _closed_once(self: Right) -> None:
    self._map.close()
    os.close(self.fd)


def _not_without_a_start(self: Right) -> None:
    if self._thread is not None:
        Right.close(self)


def _slow(self: Right) -> None:
    time.sleep(2.0)
    Right.close(self)


def _unmapped(self: Right) -> None:
    raise RuntimeError("views are there")


def memory(**methods: Any) -> type[Right]:
    return type("Bug", (Right,), methods)


THERE = "test_all_of_it_is_there_and_writable"
VIEWS = "test_every_view_shows_the_same_bytes"
ELSEWHERE = "test_a_client_maps_the_descriptor_and_shares_the_bytes"
APART = "test_two_have_nothing_in_common"
REFUSED = "test_memory_that_cannot_be_had_is_refused"
READY = "test_it_becomes_usable_in_the_background"
STAYS = "test_what_is_reported_is_there_and_stays"
UNSTARTED = "test_closing_releases_all"
MIDST = "test_closing_while_it_becomes_usable_ends_the_work"
DONE = "test_closing_releases_all"
TWICE = "test_closing_twice_closes_nothing_of_others"
LEAVING = "test_leaving_is_quick_while_views_are_there"
KEPT_BYTES = "test_kept_memory_shows_the_same_bytes"
KEPT_END = "test_closing_kept_memory_releases_all"
KEPT_SIZE = "test_kept_memory_of_another_size_is_refused"

# The planted bug, the test that must fail for it, and what the failure says.
# fmt: off
BUGS: dict[str, tuple[type[Memory], str, str]] = {
    "smaller": (memory(__init__=_smaller), THERE, "less than the requested bytes"),
    "larger than its file": (memory(__init__=_larger), THERE, "`fd` has"),
    "a view of a part": (memory(view=lambda self: memoryview(self._map)[:-1]), THERE, "of the 4"),
    "a read-only view": (memory(view=lambda self: memoryview(self._map).toreadonly()), THERE, "not writable"),
    "a view of words": (memory(view=lambda self: memoryview(self._map)[: self.capacity // 8 * 8].cast("Q")), THERE, "of the format B"),
    "a view backwards": (memory(view=lambda self: memoryview(self._map)[::-1]), THERE, "not contiguous"),
    "a copy for each view": (memory(view=lambda self: memoryview(bytearray(self._map))), VIEWS, "bytes written to another view"),
    "one view for all": (OneView, VIEWS, "a new view at each call"),
    "a private mapping": (memory(mapped=lambda self: mmap.mmap(self.fd, self.capacity, flags=mmap.MAP_PRIVATE)), ELSEWHERE, "does not show bytes that the server wrote"),
    "memory without the descriptor": (memory(mapped=lambda self: mmap.mmap(-1, self.capacity)), ELSEWHERE, "does not show bytes that the server wrote"),
    "a descriptor to read": (ToRead, ELSEWHERE, "A client cannot use the descriptor"),
    "inherited": (memory(__init__=_inherited), THERE, "inheritable"),
    "opened for children": (memory(flags=0), THERE, "inheritable"),
    "one for all": (OneForAll, APART, "changed another"),
    "an error of its own": (memory(__init__=_unregistered), REFUSED, "raised OSError, expected ArenaError"),
    "leaves after an error": (memory(__init__=_leaking), REFUSED, "n ArenaError left open: descriptor"),
    "takes what is there": (memory(__init__=lambda self, capacity: Right.__init__(self, min(capacity, 1 << 26))), REFUSED, "was accepted; it must raise ArenaError"),
    "ready in start": (memory(start=lambda self, on_ready: self.work(on_ready)), READY, "but waited for on_ready"),
    "start waits for the end": (memory(start=_wait), READY, "but waited for on_ready"),
    "never whole": (memory(ends=lambda self: [*range(STEP, self.capacity, STEP)]), READY, "all of the memory"),
    "rounded up": (memory(ends=lambda self: [*range(STEP, self.capacity + STEP, STEP)]), READY, "must be the capacity"),
    "backwards": (memory(ends=lambda self: [2 * STEP, STEP, self.capacity]), READY, "must grow at each call"),
    "each end twice": (memory(ends=lambda self: sorted([*Right.ends(self)] * 2)), READY, "must grow at each call"),
    "sizes instead of ends": (memory(ends=lambda self: [STEP] * (self.capacity // STEP) + [self.capacity]), READY, "must grow at each call"),
    "nothing first": (memory(ends=lambda self: [0, *Right.ends(self)]), READY, "on_ready(0)"),
    "reported before it is taken": (memory(work=_reported_first), STAYS, "bytes are resident"),
    "the last piece is not taken": (memory(take=_never_taken_last), STAYS, "bytes are resident"),
    "nothing is taken": (memory(take=lambda self, start, end: None), STAYS, ") 0 bytes are resident"),
    "its end first": (memory(take=_from_the_end), STAYS, "bytes are resident"),
    "clears what is in use": (memory(take=_cleared), STAYS, "which were written after on_ready"),
    "clears at the end": (memory(work=_cleared_at_the_end), STAYS, "which were written after on_ready"),
    "two workers": (memory(start=_two_workers), STAYS, "during an earlier call"),
    "mapped again by start": (memory(start=_moved), "test_a_view_from_before_the_start_stays_the_memory", "made before and after `start` show different bytes"),
    "not closed without a start": (memory(close=_not_without_a_start), UNSTARTED, "before the start left open"),
    "keeps a descriptor": (memory(close=_fd_kept), UNSTARTED, "left open: descriptor"),
    "closes once": (memory(close=_closed_once), UNSTARTED, "raised OSError"),
    "closes slowly": (memory(close=_slow), UNSTARTED, "took longer than"),
    "goes on after close": (ClosesLate, MIDST, "returned before thread"),
    "does not wait for its thread": (memory(close=_not_joined), MIDST, "returned before thread"),
    "keeps the mapping": (memory(close=_mapping_kept), DONE, ", mapping "),
    "keeps its name": (memory(opened=_opened_by_name), DONE, "left the file /dev/shm/"),
    "closes by number": (memory(close=_closed_by_force), TWICE, "that another file had taken over"),
    "does not leave": (memory(leave=_unmapped), LEAVING, "raised RuntimeError"),
    "leaves its name": (memory(opened=_opened_by_name), LEAVING, "remains after leave() and close()"),
    "ignores what is kept": (memory(__init__=_ignores), KEPT_BYTES, "shows other bytes before start()"),
    "clears what is kept": (memory(work=_cleared_if_kept), KEPT_BYTES, "changed between start()"),
    "never ready again": (memory(ends=lambda self: [] if self.kept else Right.ends(self)), KEPT_BYTES, "on_ready(1048"),
    "a private mapping of what is kept": (memory(mapped=_mapped_privately), KEPT_BYTES, "show different bytes"),
    "a copy of what is kept": (memory(__init__=_copies), KEPT_BYTES, "must be the kept file"),
    "what is kept is inherited": (memory(__init__=_lets_children_inherit), KEPT_BYTES, "inheritable"),
    "keeps the descriptor that is kept": (memory(__init__=_duplicates), KEPT_END, "of kept memory left open: descriptor"),
    "leaks what is kept after an error": (memory(__init__=_leaks), KEPT_SIZE, "for kept memory left open: descriptor"),
    "makes what is kept larger": (memory(__init__=_grows), KEPT_SIZE, "was accepted; it must raise ArenaError"),
}
# fmt: on


def _tests_of(bug: type[Memory]) -> type:
    given = pytest.fixture(lambda self: bug)
    return type("Planted", (MemoryConformance,), {"make_memory": given, "make_kept_memory": given, "patience_s": 1.5})


for name, (bug, _, _) in BUGS.items():
    globals()[f"Test_{name.replace(' ', '_')}"] = _tests_of(bug)
