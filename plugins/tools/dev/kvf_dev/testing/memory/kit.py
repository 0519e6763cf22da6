"""The settings and fixtures that the author of a memory gives to the kit, and functions its tests share."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from kvf_dev.testing.kit import wait_until
from kvf_dev.testing.making import NamedKit
from kvframework.api.memory import Memory, MemoryContext, MemoryProvider

MakeMemory = Callable[[int], Memory]
MakeKeptMemory = Callable[[int, int], Memory]

MIB = 1 << 20
PAGE = 4096
# Few pages, several steps of some MiB that do not end at a step, and a size that is no number of pages.
SIZES = {"1 MiB": MIB, "40 MiB and 3 pages": 40 * MIB + 3 * PAGE, "3 MiB and 123 bytes": 3 * MIB + 123}
CAPACITY = SIZES["40 MiB and 3 pages"]


class MemoryKit(NamedKit):
    """Settings and fixtures of the kit. An author must give either `use` or a `make_memory` fixture."""

    _descriptor = MemoryProvider
    _where = "[l1]"

    patience_s: ClassVar[float] = 20.0
    """Seconds within which memory of this size becomes usable, and closes."""

    @pytest.fixture
    def make_memory(self) -> MakeMemory:
        """Return a factory of memory by its size in bytes, which raises `ArenaError` for what cannot be had."""
        self.resolve({**self.options, "capacity": CAPACITY})  # a wrong name is an error here, and not in each test
        return self._make

    @pytest.fixture
    def make_kept_memory(self) -> MakeKeptMemory:
        """Return a factory of memory by its size and a descriptor, as `MemoryContext.kept`. Skips the test for a
        provider without `keeps`, and where a fixture `make_memory` is all that is given."""
        if not self.use:
            pytest.skip("there is no fixture `make_kept_memory`")
        return self._make

    def _make(self, capacity: int, kept: int | None = None) -> Memory:
        """Return memory, made as a server does it. Skips the test if the plugin cannot run here."""
        provider, options = self.resolve({**self.options, "capacity": capacity})
        if kept is not None and not provider.keeps:
            os.close(kept)
            pytest.skip("the provider has no `keeps`")
        memory: Memory = provider.create(options, MemoryContext(self._where, kept=kept))
        return memory

    @pytest.fixture
    def memory(self, make_memory: MakeMemory) -> Iterator[Memory]:
        memory = make_memory(CAPACITY)
        yield memory
        memory.close()

    def until_all_is_ready(self, memory: Memory, ends: list[int]) -> None:
        """Wait for `on_ready(capacity)`; `ends` has what was reported so far."""
        __tracebackhide__ = True
        what = f"on_ready({memory.capacity}), which reports all of the memory,"
        wait_until(lambda: ends and ends[-1] >= memory.capacity, what, self.patience_s)


def pages(view: memoryview) -> range:
    """Return the place of a few bytes in each page, the last bytes among them."""
    return range(len(view) % PAGE or PAGE, len(view) + 1, PAGE)


def mark(view: memoryview, number: int) -> None:
    """Write another 8 bytes into each page."""
    for end in pages(view):
        view[end - 8 : end] = (end * 31 + number).to_bytes(8, "little")


def wrong_page(view: memoryview, number: int) -> int | None:
    """Return where the first page is that has not what `mark` wrote; None if all have it."""
    for end in pages(view):
        if view[end - 8 : end] != (end * 31 + number).to_bytes(8, "little"):
            return end - 8
    return None


def taken(fd: int) -> int | None:
    """Return how many bytes of the file the kernel has allocated; None where it does not say."""
    found = os.fstat(fd)
    return found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else None


def name_of(memory: Memory) -> str:
    """Return the name by which others could open it in /dev/shm; "" for none."""
    path = os.readlink(f"/proc/self/fd/{memory.fd}")
    return path if path.startswith("/dev/shm/") and not path.endswith(" (deleted)") else ""  # noqa: S108
