"""The memory kit's tests of what the memory is: all bytes, the same in every view and in every process; and of `start`:
it becomes usable in the background, piece by piece."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading

import pytest

from kvf_dev.testing.kit import held, must_refuse
from kvf_dev.testing.memory.kit import CAPACITY, PAGE, SIZES, MakeMemory, MemoryKit, mark, taken, wrong_page
from kvframework.api.memory import ArenaError, Memory

_IN_A_CLIENT = """
import mmap, sys
fd, capacity, page = map(int, sys.argv[1:])
with mmap.mmap(fd, capacity) as mapped:
    ends = range(capacity % page or page, capacity + 1, page)
    for end in ends:
        if mapped[end - 8 : end] != (end * 31 + 1).to_bytes(8, "little"):
            sys.exit(f"byte {end - 8} of the mapped descriptor is not what the server wrote there")
    for end in ends:
        mapped[end - 8 : end] = (end * 31 + 2).to_bytes(8, "little")
"""


class ContentTests(MemoryKit):
    """Bytes."""

    @pytest.mark.parametrize("size", SIZES)
    def test_all_of_it_is_there_and_writable(self, make_memory: MakeMemory, size: str) -> None:
        memory = make_memory(SIZES[size])
        try:
            assert type(memory.capacity) is int or isinstance(memory.capacity, int), "`capacity` is a number of bytes"
            assert memory.capacity >= SIZES[size], (
                f"`capacity` is {memory.capacity}, less than the {SIZES[size]} bytes that were asked for"
            )
            if taken(memory.fd) is not None:
                nbytes = os.fstat(memory.fd).st_size
                assert nbytes >= memory.capacity, f"`fd` has {nbytes} bytes, and `capacity` is {memory.capacity}"
            with memory.view() as view:
                assert view.nbytes == memory.capacity, f"view() has {view.nbytes} of the {memory.capacity} bytes"
                assert (view.format, view.ndim) == ("B", 1), "view() is one-dimensional, of the format B"
                assert not view.readonly, "view() is not writable"
                assert view.contiguous, "view() is not contiguous"
                mark(view, 3)
                wrong = wrong_page(view, 3)
                assert wrong is None, f"byte {wrong} is not what was written there: two places are one"
        finally:
            memory.close()

    def test_every_view_shows_the_same_bytes(self, memory: Memory) -> None:
        one, other = memory.view(), memory.view()
        mark(one, 5)
        assert wrong_page(other, 5) is None, "what is written to one view is not in another one"
        one.release()
        try:
            assert wrong_page(other, 5) is None, "a view shows other bytes after another one was released"
        except ValueError:
            pytest.fail("releasing one view releases another one: view() gives a new view each time")
        other.release()
        with memory.view() as later:
            assert wrong_page(later, 5) is None, "a new view does not show what was written before"

    @pytest.mark.parametrize("size", SIZES)
    def test_another_process_maps_the_descriptor_and_shares_the_bytes(self, make_memory: MakeMemory, size: str) -> None:
        """A local client maps the descriptor, which it receives over a socket."""
        memory = make_memory(SIZES[size])
        try:
            with memory.view() as view:
                mark(view, 1)
                command = [sys.executable, "-c", _IN_A_CLIENT, *map(str, (memory.fd, int(memory.capacity), PAGE))]
                done = subprocess.run(
                    command, pass_fds=[memory.fd], capture_output=True, text=True, timeout=60, check=False
                )
                assert done.returncode == 0, f"a client cannot use the descriptor: {done.stderr.strip()[-300:]}"
                wrong = wrong_page(view, 2)
                assert wrong is None, f"byte {wrong}, written by a client, is not in view(): the mapping is not shared"
        finally:
            memory.close()

    def test_no_process_inherits_the_descriptor(self, memory: Memory) -> None:
        assert not os.get_inheritable(memory.fd), "`fd` is inheritable: every child process would hold the memory"

    def test_two_have_nothing_in_common(self, make_memory: MakeMemory, memory: Memory) -> None:
        other = make_memory(CAPACITY)
        with memory.view() as ours:
            try:
                mark(ours, 7)
                assert other.fd != memory.fd, "two memories have one descriptor"
                with other.view() as theirs:
                    mark(theirs, 8)
                assert wrong_page(ours, 7) is None, "what is written to one memory is in another one"
            finally:
                other.close()
            assert wrong_page(ours, 7) is None, "closing one memory changes another one"
            try:
                os.fstat(memory.fd)
            except OSError:
                pytest.fail("closing one memory closes the descriptor of another one")

    def test_memory_that_cannot_be_had_is_refused(self, make_memory: MakeMemory) -> None:
        before = held(mappings=True)
        must_refuse("making 2^60 bytes, which are not there,", lambda: make_memory(1 << 60).close(), ArenaError)
        left = held(mappings=True) - before
        assert not left, f"an ArenaError leaves behind: {', '.join(sorted(left))}"


class ReadinessTests(MemoryKit):
    """Becoming usable."""

    @pytest.mark.parametrize("size", SIZES)
    def test_it_becomes_usable_in_the_background(self, make_memory: MakeMemory, size: str) -> None:
        """`start` returns before the first piece has been taken; the end reported for each piece is above the one
        before."""
        memory = make_memory(SIZES[size])
        started = threading.Event()
        ends: list[int] = []
        late: list[int] = []
        threads: set[int] = set()

        def on_ready(end: int) -> None:
            if not late and not started.wait(self.patience_s):
                late.append(end)
            threads.add(threading.get_ident())
            ends.append(end)

        try:
            memory.start(on_ready)
            assert not ends, "start() waits for what on_ready does, instead of returning at once"
            started.set()
            self.until_all_is_ready(memory, ends)
            assert not late, "start() waits for what on_ready does, instead of returning at once"
            assert ends == sorted(set(ends)), f"the n of on_ready(n) grows with each call, but was {ends[:8]}"
            assert ends[0] > 0, "on_ready(0) reports nothing"
            assert ends[-1] == memory.capacity, f"on_ready({ends[-1]}) is beyond the capacity, {memory.capacity}"
            assert threading.get_ident() not in threads, "on_ready is called in the thread of start()"
        finally:
            started.set()
            memory.close()

    def test_what_is_reported_is_there(self, memory: Memory) -> None:
        """The core hands out what lies below n, and an engine's store must not wait for the kernel: a write there takes
        no more memory."""
        ends = [0]
        short: list[str] = []

        def on_ready(end: int) -> None:
            found = taken(memory.fd)
            if found is not None and found < end // PAGE * PAGE:
                short.append(f"on_ready({end}) is called while {found} bytes are resident")
            with memory.view() as view:
                for at in range(ends[-1], end, PAGE):
                    view[at] = 1
            after = taken(memory.fd)
            if found is not None and after is not None and after > found:
                short.append(f"on_ready({end}) is called while {after - found} of the first {end} are not resident")
            ends.append(end)

        memory.start(on_ready)
        self.until_all_is_ready(memory, ends)
        assert not short, short[0]

    def test_what_was_written_on_the_way_stays(self, memory: Memory) -> None:
        """The caller writes to each piece at once, while later pieces become usable."""
        ends = [0]
        calls = threading.Lock()
        at_once: list[int] = []
        with memory.view() as view:

            def on_ready(end: int) -> None:
                if not calls.acquire(blocking=False):
                    at_once.append(end)
                    return
                with memory.view() as place, place[ends[-1] : end] as piece:
                    piece[:] = b"\7" * len(piece)
                ends.append(end)
                calls.release()

            memory.start(on_ready)
            self.until_all_is_ready(memory, ends)
            assert not at_once, "on_ready is called while an earlier call is under way: n would not grow"
            for start, end in itertools.pairwise(ends):
                assert view[start:end] == b"\7" * (end - start), (
                    f"bytes [{start}, {end}) were written when they were ready, and changed since"
                )

    def test_a_view_from_before_the_start_stays_the_memory(self, memory: Memory) -> None:
        ends: list[int] = []
        with memory.view() as before:
            memory.start(ends.append)
            self.until_all_is_ready(memory, ends)
            with memory.view() as after:
                mark(after, 9)
            assert wrong_page(before, 9) is None, "a view from before the start and one from after it differ"
