"""The memory kit's tests of the end, and of memory of an earlier server, which a next one goes on with."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable

import pytest

from kvf_dev.testing.kit import held, must_refuse, wait_until
from kvf_dev.testing.memory.kit import (
    CAPACITY,
    SIZES,
    MakeKeptMemory,
    MakeMemory,
    MemoryKit,
    mark,
    name_of,
    wrong_page,
)
from kvframework.api.memory import ArenaError, Memory
from kvframework.storage.l1.journal import own_description


class EndTests(MemoryKit):
    """Closing. The tests keep the closed objects: it is `close` that frees, not the garbage collector."""

    def test_closing_before_the_start_releases_all(self, make_memory: MakeMemory) -> None:
        before = held(mappings=True)
        memory = make_memory(CAPACITY)
        name = name_of(memory)
        self._in_time(memory.close, "close()")
        self._nothing_is_left(before, name, "before the start")
        self._in_time(memory.close, "a second close()")

    def test_closing_while_it_becomes_usable_ends_the_work(self, make_memory: MakeMemory) -> None:
        before = held(mappings=True)
        memory = make_memory(CAPACITY)
        ends: list[int] = []
        is_closed: list[bool] = []
        late: list[int] = []
        closing = threading.Event()
        name = name_of(memory)

        def on_ready(end: int) -> None:
            if is_closed:
                late.append(end)
            ends.append(end)
            closing.wait(self.patience_s)  # so that close() runs while the memory still becomes usable
            time.sleep(0.01)

        memory.start(on_ready)
        wait_until(lambda: ends, "the first on_ready", self.patience_s)
        closing.set()
        self._in_time(memory.close, "close()")
        is_closed.append(True)
        self._nothing_is_left(before, name, "while it became usable")
        assert not late, "on_ready is called after close"
        self._in_time(memory.close, "a second close()")

    def test_closing_after_all_is_usable_releases_all(self, make_memory: MakeMemory) -> None:
        before = held(mappings=True)
        ends: list[int] = []
        memory = make_memory(CAPACITY)
        name = name_of(memory)
        memory.start(ends.append)
        self.until_all_is_ready(memory, ends)
        with memory.view() as view:
            view[-1] = 1
        self._in_time(memory.close, "close()")
        self._nothing_is_left(before, name, "after all was usable")

    def test_closing_twice_closes_nothing_of_others(self, make_memory: MakeMemory) -> None:
        memory = make_memory(CAPACITY)
        number = memory.fd
        memory.close()
        other = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if other != number:
            os.dup2(other, number, inheritable=False)
            os.close(other)
        self._in_time(memory.close, "a second close()")
        try:
            os.close(number)
        except OSError:
            pytest.fail("a second close() closes a descriptor that belongs to somebody else by now")

    def test_leaving_is_quick_while_views_are_there(self, make_memory: MakeMemory) -> None:
        """The process ends right afterwards. A `BufferError` is fine: the memory stays until then."""
        ends: list[int] = []
        memory = make_memory(CAPACITY)
        name = name_of(memory)
        memory.start(ends.append)
        self.until_all_is_ready(memory, ends)
        with memory.view() as view:
            with contextlib.suppress(BufferError):
                self._in_time(memory.leave, "leave()")
            view[0] = 1
        memory.close()
        assert not (name and os.path.exists(name)), f"{name} outlives leave() and close()"

    def _in_time(self, call: Callable[[], None], what: str) -> None:
        began = time.monotonic()
        try:
            call()
        except BufferError:
            raise
        except Exception as error:  # noqa: BLE001  any is the bug
            pytest.fail(f"{what} raises {type(error).__name__}: {error}; it is idempotent")
        assert time.monotonic() - began < self.patience_s, f"{what} takes longer than {self.patience_s:g} s"

    def _nothing_is_left(self, before: set[str], name: str, when: str) -> None:
        threads = sorted(each for each in held(mappings=True) - before if each.startswith("thread "))
        assert not threads, f"close() {when} returns before {', '.join(threads)} has ended"
        end = time.monotonic() + min(self.patience_s, 5.0)
        while (left := held(mappings=True) - before) and time.monotonic() < end:
            time.sleep(0.005)
        assert not left, f"close() {when} leaves behind: {', '.join(sorted(left))}"
        assert not (name and os.path.exists(name)), f"close() {when} leaves {name}"


class KeptTests(MemoryKit):
    """Memory that outlives its server. Skipped for a provider without `keeps`."""

    @pytest.mark.parametrize("size", SIZES)
    def test_kept_memory_shows_the_same_bytes(
        self, make_kept_memory: MakeKeptMemory, make_memory: MakeMemory, size: str
    ) -> None:
        """From its first moment on and until it is usable, beside an engine that still maps what the earlier server
        gave it."""
        kept, engines = self._of_an_earlier_server(make_memory, SIZES[size], mark_of_it)
        with engines:
            before = zlib.crc32(engines)
            memory = make_kept_memory(SIZES[size], kept)
            try:
                assert memory.capacity == len(engines), f"`capacity` was {len(engines)} and is {memory.capacity}"
                with memory.view() as view:
                    assert wrong_page(view, 4) is None, "kept memory shows other bytes before the start"
                    ends: list[int] = []
                    memory.start(ends.append)
                    self.until_all_is_ready(memory, ends)
                    assert ends == sorted(set(ends)), f"the n of on_ready(n) grows with each call, but was {ends[:8]}"
                    assert zlib.crc32(view) == before, "kept memory has changed while it became usable"
                    mark(view, 6)
                with mmap.mmap(memory.fd, len(engines)) as client, memoryview(client) as seen:
                    assert wrong_page(seen, 6) is None, "`fd` of kept memory is not what view() shows"
                with memoryview(engines) as seen:
                    assert wrong_page(seen, 6) is None, (
                        "an engine that maps the kept memory does not see what is written"
                    )
            finally:
                memory.close()

    def test_kept_memory_is_the_same_file(self, make_kept_memory: MakeKeptMemory, make_memory: MakeMemory) -> None:
        """The journal names the arena's file, and the kernel's locks are on it."""
        kept, engines = self._of_an_earlier_server(make_memory, CAPACITY)
        with engines:
            was = os.fstat(kept)
            memory = make_kept_memory(CAPACITY, kept)
            try:
                now = os.fstat(memory.fd)
                assert (now.st_dev, now.st_ino) == (was.st_dev, was.st_ino), "`fd` of kept memory is another file"
                assert not os.get_inheritable(memory.fd), (
                    "`fd` is inheritable: every child process would hold the memory"
                )
            finally:
                memory.close()

    @pytest.mark.parametrize("started", [False, True], ids=["before the start", "after all is usable"])
    def test_closing_kept_memory_releases_all(
        self, make_kept_memory: MakeKeptMemory, make_memory: MakeMemory, started: bool
    ) -> None:
        before = held(mappings=True)
        kept, engines = self._of_an_earlier_server(make_memory, CAPACITY)
        engines.close()
        memory = make_kept_memory(CAPACITY, kept)
        if started:
            ends: list[int] = []
            memory.start(ends.append)
            self.until_all_is_ready(memory, ends)
        memory.close()
        left = held(mappings=True) - before
        assert not left, f"close() of kept memory leaves behind: {', '.join(sorted(left))}"

    def test_kept_memory_of_another_size_is_refused(
        self, make_kept_memory: MakeKeptMemory, make_memory: MakeMemory
    ) -> None:
        """A mapping beyond its end would end the server."""
        before = held(mappings=True)
        kept, engines = self._of_an_earlier_server(make_memory, SIZES["1 MiB"])
        engines.close()
        must_refuse(
            "making 40 MiB of kept memory of 1 MiB", lambda: make_kept_memory(CAPACITY, kept).close(), ArenaError
        )
        left = held(mappings=True) - before
        assert not left, f"an ArenaError for kept memory leaves behind: {', '.join(sorted(left))}"

    def _of_an_earlier_server(
        self, make_memory: MakeMemory, capacity: int, fill: Callable[[Memory], None] = lambda _: None
    ) -> tuple[int, mmap.mmap]:
        """Return what a keeper has of memory whose server has ended, and an engine's mapping of it."""
        ends: list[int] = []
        memory = make_memory(capacity)
        memory.start(ends.append)
        self.until_all_is_ready(memory, ends)
        fill(memory)
        kept = own_description(memory.fd)
        engines = mmap.mmap(memory.fd, int(memory.capacity))
        memory.close()
        return kept, engines


def mark_of_it(memory: Memory) -> None:
    """Fill all of it, and mark each page by the number 4."""
    with memory.view() as view:
        pattern = bytes(range(1, 252)) * (4 << 10)
        for start in range(0, len(view), len(pattern)):
            piece = view[start : start + len(pattern)]
            piece[:] = pattern[: len(piece)]
        mark(view, 4)
