"""Tests of what the process and the disk do to a tier: a writer that is killed, and writes that the disk refuses."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kvframework.api.tier import Tier
from kvframework.errors import TierError
from kvframework.testing.tier.kit import MISSING, TierKit

_KILLS = 4
_KEYS = [bytes([number]) * 72 for number in (1, 2, 3)]
_LENGTHS = {1: 1_000_000, 2: 3_000_001, 3: 5}
_WRITER = """
import itertools, pickle, sys, time
sys.path[:] = {path!r}
from kvframework.api.tier import TableContext
from kvframework.registry import PluginRegistry
registry = PluginRegistry()
provider = registry.resolve("tier", {use!r})
options = registry.options(provider, pickle.loads({options!r}), where="the kit")
tier = provider.create(options, TableContext("[[l2]] #1"))
for number in itertools.cycle({lengths!r}):
    parts = [[memoryview(bytes([number]) * {lengths!r}[number])] for _ in {keys!r}]
    tier.put({keys!r}, parts, deadline=time.monotonic() + 60)
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
            with subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
                assert writer.stdin is not None
                assert writer.stdout is not None
                writer.stdin.write(self._writer().encode())
                writer.stdin.close()
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

    def _writer(self) -> str:
        options = pickle.dumps(dict(self._tier_options))
        return _WRITER.format(path=sys.path, use=self.use, options=options, keys=_KEYS, lengths=_LENGTHS)

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
            for entry in tier.scan(deadline=self.soon()):
                if entry.key in _KEYS:
                    received = self.load(tier, entry.key, max(_LENGTHS.values()))[0]
                    assert received == entry.nbytes, f"{entry.nbytes} bytes are listed, and {received} are there"


@contextlib.contextmanager
def _no_large_files(nbytes: int = 64 << 10) -> Iterator[None]:
    """Python ignores the signal of this limit, so a write beyond it fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
