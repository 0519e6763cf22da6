"""Tests of what the process and the disk do to a tier: a writer that is killed, and writes that the disk refuses."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest

from kvf_dev.testing.tier.deadlines import SHORT_S
from kvf_dev.testing.tier.kit import MISSING, TierKit
from kvframework.api.tier import Tier
from kvframework.by_name import plain
from kvframework.errors import TierError

_KILLS, _STOPS = 4, 8
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

    def test_a_writer_that_stands_still_delays_no_call_beyond_its_deadline(self, resolved: None) -> None:
        """As a node of a shared store does that is stopped or swaps, perhaps in the middle of a write: others wait for
        its locks, and in one process for each other, no longer than their deadlines allow."""
        if not (self.use and self.is_shared):
            pytest.skip("no other node uses the store, or the tier has no plugin's name")
        chance = random.Random(6)  # noqa: S311  moments to stop at
        with self._writer() as writer:
            assert writer.stdout is not None
            try:
                assert writer.stdout.readline(), "another process cannot write to the store"
                with contextlib.closing(self.watch(self.open_by_name())) as tier:
                    for _ in range(_STOPS):
                        time.sleep(chance.random() * 0.05)
                        writer.send_signal(signal.SIGSTOP)
                        os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
                        if self._waits(tier, writer):
                            break
            finally:
                writer.kill()

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

    def _waits(self, tier: Tier, writer: subprocess.Popen[bytes]) -> bool:
        """Call the tier with short deadlines beside a call with a long one, and let the writer go on. Return whether a
        call waited until its deadline. A call that outlasts it fails the test, see `WatchedTier`."""
        one, other = self.fresh_keys(2)
        waited: list[str] = []

        def long() -> None:
            with contextlib.suppress(TierError):
                tier.put([one], [[memoryview(b"value")]], deadline=time.monotonic() + self.grace_s + 2.0)

        def short() -> None:
            try:
                for _ in range(3):
                    for name, call in self.calls(tier, other, lambda: time.monotonic() + SHORT_S).items():
                        try:
                            call()
                        except TierError:
                            waited.append(name)
            finally:
                writer.send_signal(signal.SIGCONT)

        self.in_threads(long, short)
        return bool(waited)

    def test_what_the_disk_refuses_is_failed_or_a_tier_error(self, watched: Tier) -> None:
        """For a tier on files: this process cannot write beyond some bytes of a file, as if the disk were full."""
        kept, replaced, new = self.fresh_keys(3)
        self.store(watched, kept, b"kept")
        self.store(watched, replaced, b"old value")
        value = os.urandom(1 << 20)
        with _no_large_files():
            for key in (new, replaced, new):
                with contextlib.suppress(TierError):
                    watched.put([key], [[memoryview(value)]], deadline=self.soon())
        for key, whole in ((new, {value}), (replaced, {value, b"old value"})):
            received, found = self.load(watched, key, len(value))
            seen = None if received is MISSING else found[: received if isinstance(received, int) else 0]
            assert seen in {*whole, None}, "a value that the disk refused is there in part"
        self.must_load(watched, kept, b"kept", "a value that the disk refused took another one with it")
        for key in (new, replaced):
            self.store(watched, key, value)
            self.must_load(watched, key, value)
        watched.delete([kept, replaced, new], deadline=self.soon())

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


@contextlib.contextmanager
def _no_large_files(nbytes: int = 64 << 10) -> Iterator[None]:
    """Python ignores the signal of this limit, so a write beyond it fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
