"""The memory kit's tests of `start`: the memory becomes usable in the background, piece by piece."""

from __future__ import annotations

import itertools
import threading

import pytest

from kvf_dev.testing.memory.kit import PAGE, SIZES, MakeMemory, MemoryKit, mark, taken, wrong_page
from kvframework.api.memory import Memory


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
