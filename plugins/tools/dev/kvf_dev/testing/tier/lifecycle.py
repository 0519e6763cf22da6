"""Tests of a tier's end, of leaks, of the values that outlive it; and of a writer that is killed."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from functools import partial

import msgspec
import pytest

from kvf_dev.testing.kit import held
from kvf_dev.testing.tier.kit import DELETED, EVERY_CALL, MISSING, TierKit
from kvf_dev.testing.tier.watched import WatchedTier, parts_of
from kvframework.api.tier import TierEntry
from kvframework.errors import TierError
from kvframework.supervise.child import plain

_KILLS = 4
# The length of each value, by the byte that it repeats; each key repeats one of the bytes, too.
_LENGTHS = {1: 1_000_000, 2: 3_000_001, 3: 5}
_KEYS = [bytes([number]) * 72 for number in _LENGTHS]
_WRITER = """
import itertools, sys, time
sys.path[:] = sys.argv[1:]
import msgspec
from kvframework.api.tier import TableContext
from kvframework.registry.registry import PluginRegistry
use, raw, keys, lengths = msgspec.msgpack.decode(sys.stdin.buffer.read())
registry = PluginRegistry()
provider = registry.resolve("tier", use)
tier = provider.create(registry.options(provider, raw, where="the kit"), TableContext("[[l2]] #1"))
for number, length in itertools.cycle(lengths.items()):
    tier.put(keys, [[memoryview(bytes([number]) * length)] for _ in keys], deadline=time.monotonic() + 60)
    print(number, flush=True)
"""


class LifecycleTests(TierKit):
    """`close` is idempotent, and calls in flight fail with `TierError`."""

    @pytest.mark.parametrize("name", EVERY_CALL)
    def test_a_closed_tier_fails_every_call(self, watched: WatchedTier, name: str) -> None:
        (key,) = self.fresh_keys(1)
        watched.store(key, b"value")
        watched.close()
        self.must_raise(name, lambda: self.call(watched, name, key), "the tier is closed")

    @pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
    def test_closing_twice_is_closing_once(self, watched: WatchedTier, used: bool) -> None:
        (key,) = self.fresh_keys(1)
        if used:
            watched.store(key, b"value")
            self.in_threads(watched.close, watched.close, watched.close)
        watched.close()
        watched.close()
        self.must_raise("contains", lambda: watched.contains([key]), "the tier is closed")

    def test_closing_ends_the_calls_in_flight(self, watched: WatchedTier) -> None:
        keys, value = self.fresh_keys(20), os.urandom(100_000)
        watched.store(keys[0], value)
        begun = threading.Semaphore(0)
        ended: list[float] = []

        def work(put: bool) -> None:
            call = watched.put if put else watched.get_into
            buffers = parts_of(bytearray(value) for _ in keys)
            give_up = self.soon()
            with contextlib.suppress(TierError):
                while time.monotonic() < give_up:
                    try:
                        call(keys, buffers)
                    finally:
                        begun.release()
            ended.append(time.monotonic())

        def close() -> None:
            for _ in range(8):
                assert begun.acquire(timeout=self.patience_s), "calls of four threads do not end"
            closed = time.monotonic()
            watched.close()
            assert time.monotonic() - closed < self.grace_s, "the tier's close took too long"
            ended.append(closed)

        self.in_threads(close, *(partial(work, put) for put in (True, False, True, False)))
        assert max(ended) - min(ended) < self.grace_s, "a call of the tier went on after close"

    def test_values_outlive_the_tier(self, watched: WatchedTier) -> None:
        """They are counted and listed as before, too."""
        if not self.persistent:
            pytest.skip("persistent = False")
        sizes = (0, 1, 5000, 1 << 20)
        values = {key: os.urandom(size) for key, size in zip(self.fresh_keys(len(sizes)), sizes, strict=True)}
        (gone,) = self.fresh_keys(1)
        empty, _ = self._seen(watched, values)  # what is counted from the first call on would be nothing later
        watched.store_all({**values, gone: b"gone"})
        assert watched.delete([gone]) == [DELETED]
        used, before = self._seen(watched, values)
        time.sleep(3 * self.time_step_s)  # so that the time of opening is another one
        watched.close()
        again = self.another(watched)
        for key, value in values.items():
            again.must_load(key, value)
        assert again.contains([gone]) == [MISSING]
        then, after = self._seen(again, values)
        assert then == used, "usage() changed when the store was opened again"
        assert {key: entry.nbytes for key, entry in after.items()} == {
            key: entry.nbytes for key, entry in before.items()
        }, "scan lists other values after the store was opened again"
        for key, entry in before.items():
            moved = 0.0 if entry.used_at is None else abs((after[key].used_at or 0.0) - entry.used_at)
            assert moved <= self.time_step_s, f"opening the store again moved used_at by {moved:.1f} s"
        again.store(gone, b"a value of the next life")
        again.close()
        third = self.another(watched)
        third.must_load(gone, b"a value of the next life")
        assert third.delete([*values, gone]) == [DELETED] * (len(values) + 1)
        left = self._seen(third, values)[0] - empty
        assert left <= 0, f"the tier's used_bytes are {left} too high after all values were deleted"

    def _seen(self, tier: WatchedTier, values: dict[bytes, bytes]) -> tuple[int, dict[bytes, TierEntry]]:
        """Return what `usage` counts, and what `scan` lists of these keys; nothing where the tier lacks the method."""
        known = tier.capabilities()
        return (
            tier.usage().used_bytes if "usage" in known else 0,
            tier.listed(values) if "scan" in known else {},
        )


class LeakTests(TierKit):
    """With `reopen`, files and threads are counted over several tiers; else before and after one, and nothing that the
    `tier` fixture depends on may open files or start threads in this process."""

    @pytest.fixture
    def before(self) -> set[str]:
        """The files and threads of this process before there is a tier."""
        return held()

    def a_life(self, tier: WatchedTier) -> None:
        """Use the tier in several threads and close it."""

        def work() -> None:
            keys = self.fresh_keys(5)
            tier.put(keys, parts_of([b"v" * 1000] * 5))
            for room in (1000, 10):
                tier.get_into(keys, parts_of(bytearray(room) for _ in keys))
            tier.contains(self.fresh_keys(2))
            tier.delete(keys)
            self.must_raise("put", lambda: tier.put(keys, [[]] * 5, deadline=0.0), "the deadline has passed")

        self.in_threads(work, work, work)
        tier.close()

    def test_closing_gives_files_and_threads_back(self, before: set[str], watched: WatchedTier) -> None:
        self.a_life(watched)
        if self.can_reopen:
            before = held()  # the process now holds all that it keeps for any number of tiers
            for _ in range(3):
                self.a_life(self.watch(self.reopen(watched.inner)))
        deadline = time.monotonic() + self.grace_s
        while len(left := held()) > len(before) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(left) <= len(before), f"the tier leaves behind after close: {', '.join(sorted(left - before))}"


class CrashTests(TierKit):
    """A value is visible whole or not at all, also to other processes and after a crash."""

    def test_a_writer_that_is_killed_leaves_whole_values(self) -> None:
        """With `use`: another process makes the tier by its name and options."""
        if not (self.use and (self.persistent or self.is_shared)):
            pytest.skip("no value outlives a process, or the tier has no plugin's name")
        self.resolve()
        chance = random.Random(5)  # noqa: S311  moments to kill at
        for _ in range(_KILLS):
            with self._writer() as writer:
                assert writer.stdout is not None
                started = writer.stdout.readline()
                began = time.monotonic()
                writer.stdout.readline()
                time.sleep(chance.random() * 2 * (time.monotonic() - began))  # so long as a put takes here
                writer.kill()
            assert started, "a tier in another process cannot write to the store"
            with contextlib.closing(self.watch(self.open_by_name())) as again:
                self._must_be_whole(again)
        with contextlib.closing(self.watch(self.open_by_name())) as again:
            for key in _KEYS:
                again.store(key, b"after the crash")
                again.must_load(key, b"after the crash", "a value cannot be replaced after a crash of its writer")
            again.delete(_KEYS)

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

    def _must_be_whole(self, tier: WatchedTier) -> None:
        for key in _KEYS:
            received, found = tier.load(key, max(_LENGTHS.values()))
            if received is MISSING:
                continue
            assert isinstance(received, int), f"get_into returned {received} for a value of a killed writer"
            value = found[:received]
            whole = bool(value) and _LENGTHS.get(value[0]) == len(value) and value == value[:1] * len(value)
            assert whole, f"get_into returned a part or a mixture of values of a killed writer: {received} bytes"
        if "scan" in tier.capabilities():
            # What the writer had sent may arrive in between: then another listing is right.
            wrong = self._listed_wrongly(tier) and self._listed_wrongly(tier) and self._listed_wrongly(tier)
            assert not wrong, wrong

    def _listed_wrongly(self, tier: WatchedTier) -> str:
        for key, entry in tier.listed(_KEYS).items():
            received = tier.load(key, max(_LENGTHS.values()))[0]
            if received != entry.nbytes:
                return f"scan lists {entry.nbytes} bytes, but get_into returned {received}"
        return ""
