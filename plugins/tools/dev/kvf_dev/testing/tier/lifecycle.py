"""Tests of a tier's end, of the values that outlive it, and of leaks: files, threads and the caller's memory. And of
`shared` tiers: two, as of two nodes, on one store at the same time."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Sequence

import pytest

from kvf_dev.testing.tier.kit import DAMAGED, DELETED, EVERY_CALL, FOUND, MISSING, STORED, TierKit
from kvframework.api.tier import Outcome, Tier
from kvframework.errors import TierError


class LifecycleTests(TierKit):
    """`close` is idempotent, and calls in flight fail with `TierError`."""

    @pytest.mark.parametrize("name", EVERY_CALL)
    def test_a_closed_tier_fails_every_call(self, watched: Tier, name: str) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, b"value")
        watched.close()
        self.must_raise(name, self.every_call(watched, key, self.soon)[name], "the tier is closed")

    def test_a_tier_that_did_nothing_closes(self, watched: Tier) -> None:
        watched.close()

    def test_closing_twice_is_closing_once(self, watched: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, b"value")
        watched.close()
        watched.close()
        self.in_threads(watched.close, watched.close)

    def test_closing_at_the_same_time_is_closing_once(self, watched: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, b"value")
        self.in_threads(watched.close, watched.close, watched.close)
        self.must_raise("contains", lambda: watched.contains([key], deadline=self.soon()), "the tier is closed")

    def test_closing_ends_the_calls_in_flight(self, watched: Tier) -> None:
        keys, value = self.fresh_keys(20), os.urandom(100_000)
        self.store(watched, keys[0], value)
        begun = threading.Semaphore(0)
        ended: list[float] = []

        def work(put: bool) -> None:
            give_up = self.soon()
            buffers = [bytearray(len(value)) for _ in keys]
            while time.monotonic() < give_up:
                outcomes: Sequence[int | Outcome]
                try:
                    if put:
                        outcomes = watched.put(keys, [[memoryview(value)]] * len(keys), deadline=self.soon())
                    else:
                        outcomes = watched.get_into(keys, self.parts_of(buffers), deadline=self.soon())
                except TierError:
                    break
                finally:
                    begun.release()
                wrong = [outcome for outcome in outcomes if not isinstance(outcome, int | Outcome)]
                assert not wrong, f"an outcome is a {type(wrong[0]).__name__} while the tier closes"
            ended.append(time.monotonic())

        def close() -> None:
            for _ in range(8):
                assert begun.acquire(timeout=self.patience_s), "calls of four threads do not end: none gets its turn"
            closed = time.monotonic()
            watched.close()
            assert time.monotonic() - closed < self.grace_s, "close took too long"
            ended.append(closed)

        self.in_threads(close, *(lambda put=put: work(put) for put in (True, False, True, False)))
        assert max(ended) - min(ended) < self.grace_s, "a call went on after the tier was closed"

    def test_values_outlive_the_tier(self, watched: Tier) -> None:
        if not self.persistent:
            pytest.skip("persistent = False")
        keys = self.fresh_keys(4)
        values = [b"", b"1", os.urandom(5000), os.urandom(1 << 20)]
        for key, value in zip(keys, values, strict=True):
            self.store(watched, key, value)
        gone = keys.pop(1)
        values.pop(1)
        watched.delete([gone], deadline=self.soon())
        watched.close()
        again = self.another(watched)
        for key, value in zip(keys, values, strict=True):
            self.must_load(again, key, value)
        assert again.contains([gone], deadline=self.soon()) == [Outcome.MISSING]
        self.store(again, gone, b"a value of the next life")
        again.close()
        self.must_load(self.another(watched), gone, b"a value of the next life")


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


class SharingTests(TierKit):
    """For tiers that are `shared`."""

    @pytest.fixture
    def other(self, watched: Tier) -> Tier:
        """A second tier over the store of `tier`."""
        if not self.is_shared:
            pytest.skip("the tier is not shared")
        if not self.use and type(self).reopen is TierKit.reopen:
            pytest.fail("the tier is shared: give `reopen(tier)`, a second tier over the same store")
        return self.another(watched)

    def test_each_sees_what_the_other_stores(self, watched: Tier, other: Tier) -> None:
        one, two = self.fresh_keys(2)
        value = os.urandom(70_000)
        self.store(watched, one, value)
        self.store(other, two, b"of the other")
        assert other.contains([one, two], deadline=self.soon()) == [FOUND, FOUND]
        self.must_load(other, one, value)
        self.must_load(watched, two, b"of the other")
        self.store(other, one, b"replaced")
        self.must_load(watched, one, b"replaced")
        self.store(other, one, b"replaced by more")
        self.must_answer(watched, one, 8, DAMAGED)
        self.must_load(watched, one, b"replaced by more")

    def test_each_sees_what_the_other_deletes(self, watched: Tier, other: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, b"value")
        self.must_load(other, key, b"value")
        assert other.delete([key], deadline=self.soon()) == [DELETED]
        assert watched.contains([key], deadline=self.soon()) == [MISSING]
        self.must_answer(watched, key, 5, MISSING)
        assert watched.delete([key], deadline=self.soon()) == [MISSING]

    def test_closing_one_leaves_the_other_at_work(self, watched: Tier, other: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, b"value")
        watched.close()
        self.must_load(other, key, b"value")
        self.store(other, key, b"again")
        self.must_load(other, key, b"again")

    def test_two_at_work_on_the_same_keys_see_whole_values(self, watched: Tier, other: Tier) -> None:
        keys, size = self.fresh_keys(2), 50_000
        for key in keys:
            self.store(watched, key, b"\x09" * size)

        def work(mine: Tier, byte: int) -> None:
            for _ in range(20):
                values = [bytes([byte]) * size for _ in keys]
                assert mine.put(keys, self.parts_of(values), deadline=self.soon()) == [STORED] * len(keys)
                buffers = [bytearray(size) for _ in keys]
                assert mine.get_into(keys, self.parts_of(buffers), deadline=self.soon()) == [size] * len(keys)
                for buffer in buffers:
                    assert buffer == buffer[:1] * size, "bytes of several values, or of none, in one"
                    assert buffer[0] in (1, 2, 9), "bytes that nobody stored"

        self.in_threads(lambda: work(watched, 1), lambda: work(other, 2))
