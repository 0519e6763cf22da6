"""The memory kit's tests of the end: closing at any time, twice, and leaving without closing."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

import pytest

from kvf_dev.testing.memory.kit import CAPACITY, MakeMemory, MemoryKit, held, name_of


class EndTests(MemoryKit):
    """Closing. The tests keep the closed objects: it is `close` that frees, not the garbage collector."""

    def test_closing_before_the_start_releases_all(self, make_memory: MakeMemory) -> None:
        before = held()
        memory = make_memory(CAPACITY)
        name = name_of(memory)
        self._in_time(memory.close, "close()")
        self._nothing_is_left(before, name, "before the start")
        self._in_time(memory.close, "a second close()")

    def test_closing_while_it_becomes_usable_ends_the_work(self, make_memory: MakeMemory) -> None:
        before = held()
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
        self.until(lambda: ends, "the first on_ready")
        closing.set()
        self._in_time(memory.close, "close()")
        is_closed.append(True)
        self._nothing_is_left(before, name, "while it became usable")
        assert not late, "on_ready is called after close"
        self._in_time(memory.close, "a second close()")

    def test_closing_after_all_is_usable_releases_all(self, make_memory: MakeMemory) -> None:
        before = held()
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

    def test_one_is_made_after_another(self, make_memory: MakeMemory) -> None:
        """As by a server that starts again."""
        for _ in range(3):
            ends: list[int] = []
            memory = make_memory(CAPACITY)
            memory.start(ends.append)
            self.until_all_is_ready(memory, ends)
            memory.close()

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
        threads = sorted(each for each in held() - before if each.startswith("thread "))
        assert not threads, f"close() {when} returns before {', '.join(threads)} has ended"
        end = time.monotonic() + min(self.patience_s, 5.0)
        while (left := held() - before) and time.monotonic() < end:
            time.sleep(0.005)
        assert not left, f"close() {when} leaves behind: {', '.join(sorted(left))}"
        assert not (name and os.path.exists(name)), f"close() {when} leaves {name}"
