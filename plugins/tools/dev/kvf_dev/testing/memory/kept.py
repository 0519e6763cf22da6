"""The memory kit's tests of a provider with `keeps`: memory of an earlier server, which a next one goes on with."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable

import pytest

from kvf_dev.testing.memory.kit import (
    CAPACITY,
    SIZES,
    MakeKeptMemory,
    MakeMemory,
    MemoryKit,
    held,
    mark,
    wrong_page,
)
from kvframework.api.memory import ArenaError, Memory
from kvframework.storage.l1.journal import own_description


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
        before = held()
        kept, engines = self._of_an_earlier_server(make_memory, CAPACITY)
        engines.close()
        memory = make_kept_memory(CAPACITY, kept)
        if started:
            ends: list[int] = []
            memory.start(ends.append)
            self.until_all_is_ready(memory, ends)
        memory.close()
        left = held() - before
        assert not left, f"close() of kept memory leaves behind: {', '.join(sorted(left))}"

    def test_kept_memory_of_another_size_is_refused(
        self, make_kept_memory: MakeKeptMemory, make_memory: MakeMemory
    ) -> None:
        """A mapping beyond its end would end the server."""
        before = held()
        kept, engines = self._of_an_earlier_server(make_memory, SIZES["1 MiB"])
        engines.close()
        try:
            memory = make_kept_memory(CAPACITY, kept)
        except ArenaError:
            pass
        except Exception as error:  # noqa: BLE001  any other is the bug
            pytest.fail(f"kept memory of another size raises {type(error).__name__} instead of ArenaError: {error}")
        else:
            memory.close()
            pytest.fail("kept memory of 1 MiB is taken for 40 MiB")
        left = held() - before
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
