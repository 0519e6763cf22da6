"""Tests of leaks: files, threads and the caller's memory."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref

import pytest

from kvf_dev.testing.tier.kit import STORED, TierKit
from kvframework.api.tier import Tier
from kvframework.errors import TierError


class Tracked(bytearray):
    """Memory whose release a test can observe through a weak reference."""


class LeakTests(TierKit):
    """With `reopen`, files and threads are counted over several tiers, else before and after the only one. In that case
    nothing that the `tier` fixture depends on may open files or start threads in this process.
    """

    @pytest.fixture
    def before(self) -> set[str]:
        """The files and threads of this process before there is a tier."""
        return _open()

    def a_life(self, tier: Tier) -> None:
        """Use the tier in several threads and close it."""

        def work() -> None:
            keys = self.fresh_keys(5)
            tier.put(keys, self.parts_of([b"v" * 1000] * 5), deadline=self.soon())
            tier.get_into(keys, self.parts_of([bytearray(1000) for _ in keys]), deadline=self.soon())
            tier.get_into(keys, self.parts_of([bytearray(10) for _ in keys]), deadline=self.soon())
            tier.contains(self.fresh_keys(2), deadline=self.soon())
            tier.delete(keys, deadline=self.soon())
            self.must_raise("put", lambda: tier.put(keys, [[]] * 5, deadline=0.0), "the deadline has passed")

        self.in_threads(work, work, work)
        tier.close()

    def test_closing_gives_files_and_threads_back(self, before: set[str], watched: Tier) -> None:
        self.a_life(watched)
        if self.use or type(self).reopen is not TierKit.reopen:
            before = _open()  # the process now holds all that it keeps for any number of tiers
            for _ in range(3):
                self.a_life(self.reopened(watched))
        deadline = time.monotonic() + self.grace_s
        while len(left := _open()) > len(before) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(left) <= len(before), f"left behind: {', '.join(sorted(left - before))}"

    def test_memory_is_not_kept(self, watched: Tier) -> None:
        keys = self.fresh_keys(3)
        sources, targets = ([Tracked(b"m" * 50_000) for _ in keys] for _ in range(2))
        gone = [weakref.ref(memory) for memory in sources + targets]
        assert watched.put(keys, self.parts_of(sources), deadline=self.soon()) == [STORED] * 3
        assert watched.get_into(keys, self.parts_of(targets), deadline=self.soon()) == [len(each) for each in targets]
        watched.get_into(keys, [[memoryview(each)[:10]] for each in targets], deadline=self.soon())
        del sources, targets
        gc.collect()
        assert not any(memory() is not None for memory in gone), "the tier keeps memory of the caller"

    def test_memory_of_a_failed_call_is_not_kept(self, watched: Tier) -> None:
        keys = self.fresh_keys(3)
        memory = [Tracked(b"m" * 50_000) for _ in keys]
        gone = [weakref.ref(each) for each in memory]
        for call in (watched.put, watched.get_into):
            for deadline in (0.0, time.monotonic() + 0.0005):
                with contextlib.suppress(TierError):
                    call(keys, self.parts_of(memory), deadline=deadline)
        watched.close()
        with pytest.raises(TierError):
            watched.put(keys, self.parts_of(memory), deadline=self.soon())
        del memory
        gc.collect()
        assert not any(each() is not None for each in gone), "the tier keeps memory of the caller"


def _open() -> set[str]:
    """Return what this process has open: `file <number>: <target>` and `thread <name>`."""
    found = {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.add(f"file {number}: {os.readlink(f'/proc/self/fd/{number}')}")
    return found
