"""Tests of a tier's end, of the values that outlive it, of leaks, of two nodes on one store; and of a writer that is
killed."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence

import msgspec
import pytest

from kvf_dev.testing.kit import held
from kvf_dev.testing.tier.kit import DAMAGED, DELETED, EVERY_CALL, FOUND, MISSING, STORED, TierKit
from kvframework.api.tier import Outcome, Tier
from kvframework.by_name import plain
from kvframework.errors import TierError


class LifecycleTests(TierKit):
    """`close` is idempotent, and calls in flight fail with `TierError`."""

    @pytest.mark.parametrize("name", EVERY_CALL)
    def test_a_closed_tier_fails_every_call(self, watched: Tier, name: str) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, b"value")
        watched.close()
        self.must_raise(name, self.every_call(watched, key, self.soon)[name], "the tier is closed")

    @pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
    def test_closing_twice_is_closing_once(self, watched: Tier, used: bool) -> None:
        (key,) = self.fresh_keys(1)
        if used:
            self.store(watched, key, b"value")
            self.in_threads(watched.close, watched.close, watched.close)
        watched.close()
        watched.close()
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
        return held()

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
        if self.can_reopen:
            before = held()  # the process now holds all that it keeps for any number of tiers
            for _ in range(3):
                self.a_life(self.reopened(watched))
        deadline = time.monotonic() + self.grace_s
        while len(left := held()) > len(before) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(left) <= len(before), f"left behind: {', '.join(sorted(left - before))}"

    def test_memory_is_not_kept_nor_that_of_a_failed_call(self, watched: Tier) -> None:
        keys = self.fresh_keys(3)
        sources, targets = ([Tracked(b"m" * 50_000) for _ in keys] for _ in range(2))
        gone = [weakref.ref(memory) for memory in sources + targets]
        assert watched.put(keys, self.parts_of(sources), deadline=self.soon()) == [STORED] * 3
        assert watched.get_into(keys, self.parts_of(targets), deadline=self.soon()) == [len(each) for each in targets]
        watched.get_into(keys, [[memoryview(each)[:10]] for each in targets], deadline=self.soon())
        for call in (watched.put, watched.get_into):
            for deadline in (0.0, time.monotonic() + 0.0005):
                with contextlib.suppress(TierError):
                    call(keys, self.parts_of(targets), deadline=deadline)
        watched.close()
        with pytest.raises(TierError):
            watched.put(keys, self.parts_of(sources), deadline=self.soon())
        del sources, targets
        gc.collect()
        assert not any(memory() is not None for memory in gone), "the tier keeps memory of the caller"


class SharingTests(TierKit):
    """For tiers that are `shared`."""

    @pytest.fixture
    def other(self, watched: Tier) -> Tier:
        """A second tier over the store of `tier`."""
        if not self.is_shared:
            pytest.skip("the tier is not shared")
        if not self.can_reopen:
            pytest.fail("the tier is shared: give `reopen(tier)`, a second tier over the same store")
        return self.another(watched)

    def test_each_sees_what_the_other_does(self, watched: Tier, other: Tier) -> None:
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
        assert other.delete([two], deadline=self.soon()) == [DELETED]
        assert watched.contains([two], deadline=self.soon()) == [MISSING]
        self.must_answer(watched, two, 5, MISSING)
        assert watched.delete([two], deadline=self.soon()) == [MISSING]
        watched.close()
        self.must_load(other, one, b"replaced by more", "after the other was closed")
        self.store(other, one, b"again")

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


_KILLS = 4
# The length of each value, by the byte that it repeats; each key repeats one of the bytes, too.
_LENGTHS = {1: 1_000_000, 2: 3_000_001, 3: 5}
_KEYS = [bytes([number]) * 72 for number in _LENGTHS]
_WRITER = """
import itertools, sys, time
sys.path[:] = sys.argv[1:]
import msgspec
from kvframework.api.tier import TableContext
from kvframework.registry import PluginRegistry
use, raw, keys, lengths = msgspec.msgpack.decode(sys.stdin.buffer.read())
registry = PluginRegistry()
provider = registry.resolve("tier", use)
tier = provider.create(registry.options(provider, raw, where="the kit"), TableContext("[[l2]] #1"))
for number, length in itertools.cycle(lengths.items()):
    tier.put(keys, [[memoryview(bytes([number]) * length)] for _ in keys], deadline=time.monotonic() + 60)
    print(number, flush=True)
"""


class CrashTests(TierKit):
    """A value is visible whole or not at all, also to other processes and after a crash."""

    @pytest.fixture
    def resolved(self) -> None:
        """With `use`: the plugin is there, and takes the options."""
        if self.use:
            self.resolve()

    def test_a_writer_that_is_killed_leaves_whole_values(self, resolved: None) -> None:
        """With `use`: another process makes the tier by its name and options."""
        if not (self.use and (self.persistent or self.is_shared)):
            pytest.skip("no value outlives a process, or the tier has no plugin's name")
        chance = random.Random(5)  # noqa: S311  moments to kill at
        for _ in range(_KILLS):
            with self._writer() as writer:
                assert writer.stdout is not None
                started = writer.stdout.readline()
                began = time.monotonic()
                writer.stdout.readline()
                time.sleep(chance.random() * 2 * (time.monotonic() - began))  # so long as a put takes here
                writer.kill()
            assert started, "another process cannot write to the store"
            with contextlib.closing(self.watch(self.open_by_name())) as again:
                self._must_be_whole(again)
        with contextlib.closing(self.watch(self.open_by_name())) as again:
            for key in _KEYS:
                self.store(again, key, b"after the crash")
                self.must_load(again, key, b"after the crash", "a crash left something in the way")
            again.delete(_KEYS, deadline=self.soon())

    def _writer(self) -> subprocess.Popen[bytes]:
        """Return a process that puts values in turn, and prints a line after each."""
        command = [sys.executable, "-c", _WRITER, *sys.path]
        writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert writer.stdin is not None
        writer.stdin.write(
            msgspec.msgpack.encode([self.use, dict(self._tier_options), _KEYS, _LENGTHS], enc_hook=plain)
        )
        writer.stdin.close()
        return writer

    def _must_be_whole(self, tier: Tier) -> None:
        for key in _KEYS:
            received, found = self.load(tier, key, max(_LENGTHS.values()))
            if received is MISSING:
                continue
            assert isinstance(received, int), f"a killed writer left a value that is {received}"
            value = found[:received]
            whole = bool(value) and _LENGTHS.get(value[0]) == len(value) and value == value[:1] * len(value)
            assert whole, f"a killed writer left a value in part, or a mixture of two: {received} bytes"
        if "scan" in tier.capabilities():
            # What the writer had sent may arrive in between: then another listing is right.
            wrong = self._listed_wrongly(tier) and self._listed_wrongly(tier) and self._listed_wrongly(tier)
            assert not wrong, wrong

    def _listed_wrongly(self, tier: Tier) -> str:
        for entry in tier.scan(deadline=self.soon()):
            if entry.key in _KEYS:
                received = self.load(tier, entry.key, max(_LENGTHS.values()))[0]
                if received != entry.nbytes:
                    return f"{entry.nbytes} bytes are listed, and {received} are there"
        return ""
