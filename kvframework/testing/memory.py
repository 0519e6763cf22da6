"""The conformance kit for the memory of L1: tests that every `Memory` must pass. Runs under pytest.

    from kvframework.testing import MemoryConformance

    class TestMyMemory(MemoryConformance):
        use = "mymemory"                            # the entry point `memory.mymemory`

A memory that is no plugin yet, or whose size is not the option `capacity`, comes from a fixture:

        @pytest.fixture
        def make_memory(self):
            return lambda capacity: MyMemory(capacity)

Sizes are some MiB. Needs pytest alone.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import pytest

from kvframework.api.memory import Memory, MemoryProvider, TableContext
from kvframework.config import PluginTable
from kvframework.errors import PluginUnavailable
from kvframework.registry import PluginRegistry, resolve_table
from kvframework.testing.kit import Kit

MakeMemory = Callable[[int], Memory]

_MIB = 1 << 20
_CAPACITY = 5 * _MIB + 12_288
_ANSWER = """
import mmap, sys
with mmap.mmap(int(sys.argv[1]), int(sys.argv[2])) as mapped:
    assert mapped[:4] == b"ping" and mapped[-4:] == b"last", (mapped[:4], mapped[-4:])
    mapped[:4] = b"pong"
"""


class MemoryConformance(Kit):
    """Base class of an author's test class, which gives `use`, and `options` if there are any; or a fixture
    `make_memory`, a factory that takes the size in bytes."""

    use: ClassVar[str] = ""
    """Name of the plugin; its entry point is `memory.<use>`. The option `capacity` sets its size."""

    options: ClassVar[Mapping[str, object]] = {}
    """Other options of the plugin, as in its `[l1]` table."""

    patience_s: ClassVar[float] = 20.0
    """Seconds within which memory of this size becomes usable, and closes."""

    @pytest.fixture
    def make_memory(self) -> MakeMemory:
        if not self.use:
            pytest.fail("give `use`, the plugin's name, or a fixture `make_memory`")
        return self._by_name

    def _by_name(self, capacity: int) -> Memory:
        """Return a factory that makes memory as a server does. Skips the test if the plugin cannot run here."""
        table = PluginTable(self.use, {**self.options, "capacity": capacity}, "[l1]")
        try:
            provider, options = resolve_table(PluginRegistry(), table, MemoryProvider)
        except PluginUnavailable as error:
            pytest.skip(error.fact)
        memory: Memory = provider.create(options, TableContext(table.where))
        return memory

    @pytest.fixture
    def memory(self, make_memory: MakeMemory) -> Iterator[Memory]:
        memory = make_memory(_CAPACITY)
        yield memory
        memory.close()

    # what the memory is

    def test_all_of_it_is_there_and_writable(self, memory: Memory) -> None:
        assert memory.capacity >= _CAPACITY
        with memory.view() as view:
            assert (view.nbytes, view.itemsize, view.ndim) == (memory.capacity, 1, 1)
            assert not view.readonly
            assert view.contiguous

    def test_every_view_shows_the_same_bytes(self, memory: Memory) -> None:
        with memory.view() as one, memory.view() as other:
            one[7:10] = b"abc"
            assert bytes(other[7:10]) == b"abc"

    def test_another_process_maps_the_descriptor_and_shares_the_bytes(self, memory: Memory) -> None:
        """A local client maps the descriptor, which it receives over a socket."""
        with memory.view() as view:
            view[:4], view[-4:] = b"ping", b"last"
            command = [sys.executable, "-c", _ANSWER, str(memory.fd), str(int(memory.capacity))]
            done = subprocess.run(
                command, pass_fds=[memory.fd], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr
            assert bytes(view[:4]) == b"pong"

    def test_no_process_inherits_the_descriptor(self, memory: Memory) -> None:
        assert not os.get_inheritable(memory.fd)

    def test_two_have_nothing_in_common(self, make_memory: MakeMemory, memory: Memory) -> None:
        other = make_memory(_CAPACITY)
        try:
            with memory.view() as ours, other.view() as theirs:
                ours[:4] = b"ours"
                assert bytes(theirs[:4]) != b"ours"
        finally:
            other.close()

    # becoming usable

    def test_it_becomes_usable_in_the_background(self, memory: Memory) -> None:
        """`start` returns before the first piece has been taken; the end reported for each piece is above the one
        before."""
        taken, told = threading.Event(), []
        threads = set()

        def on_ready(end: int) -> None:
            assert taken.wait(self.patience_s)
            told.append(end)
            threads.add(threading.get_ident())

        memory.start(on_ready)
        assert told == [], "start waits for what on_ready does"
        taken.set()
        self._until(lambda: told and told[-1] == memory.capacity, "all of the memory to be usable")
        assert told == sorted(set(told))
        assert told[0] > 0
        assert threading.get_ident() not in threads

    def test_what_was_written_on_the_way_stays(self, memory: Memory) -> None:
        """The caller writes to each piece at once, while later pieces become usable."""
        told = [0]
        with memory.view() as view:

            def on_ready(end: int) -> None:
                view[told[-1]] = view[end - 1] = 7
                told.append(end)

            memory.start(on_ready)
            self._until(lambda: told[-1] == memory.capacity, "all of the memory to be usable")
            assert all(view[start] == view[end - 1] == 7 for start, end in itertools.pairwise(told))

    # the end

    def test_closing_ends_the_work_and_lets_go_of_all(self, make_memory: MakeMemory) -> None:
        """Closing works before the start, while the memory becomes usable, and twice."""
        before = _held()
        make_memory(_CAPACITY).close()
        memory, told = make_memory(_CAPACITY), []

        def on_ready(end: int) -> None:
            told.append(end)
            time.sleep(0.01)  # so that close() runs while the memory still becomes usable

        memory.start(on_ready)
        self._until(lambda: told, "the first piece")
        began = time.monotonic()
        memory.close()
        assert time.monotonic() - began < self.patience_s
        count = len(told)
        memory.close()
        self._until(lambda: not _held() - before, "descriptors, mappings and threads to be gone")
        assert len(told) == count, "on_ready is called after close"

    def _until(self, true: Callable[[], object], what: str) -> None:
        end = time.monotonic() + self.patience_s
        while not true():
            assert time.monotonic() < end, f"waited {self.patience_s} s for {what}"
            time.sleep(0.005)


def _held() -> set[str]:
    """Return what this process holds: open descriptors, shared mappings and threads."""
    with open("/proc/self/maps") as file:
        shared = {line.split()[0] for line in file if line.split(None, 2)[1].endswith("s")}
    threads = {str(thread.ident) for thread in threading.enumerate()}
    return shared | threads | {f"descriptor {fd}" for fd in os.listdir("/proc/self/fd")}
