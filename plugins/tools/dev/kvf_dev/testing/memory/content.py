"""The memory kit's tests of what the memory is: all bytes, the same in every view and in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvf_dev.testing.memory.kit import CAPACITY, PAGE, SIZES, MakeMemory, MemoryKit, held, mark, taken, wrong_page
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
        before = held()
        try:
            memory = make_memory(1 << 60)
        except ArenaError:
            pass
        except Exception as error:  # noqa: BLE001  any other is the bug
            pytest.fail(f"2^60 bytes raise {type(error).__name__} instead of ArenaError: {error}")
        else:
            memory.close()
            pytest.fail("2^60 bytes are there without an ArenaError: engines would write to memory that is not there")
        left = held() - before
        assert not left, f"an ArenaError leaves behind: {', '.join(sorted(left))}"
