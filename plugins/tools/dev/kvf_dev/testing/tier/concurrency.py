"""Tests of several threads on one tier, as the server's storage threads use it, with frequent switches between them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvf_dev.testing.tier.kit import DELETED, FOUND, MISSING, STORED, TierKit
from kvframework.api.tier import Outcome, Tier

# Rounds with values of these sizes: small ones, whose steps lie close together, often; large ones, which take long.
SIZES = [(150, 600), (12, 100_000)]
sized = pytest.mark.parametrize(("rounds", "size"), SIZES)

# As many threads as a busy server has for one tier: loads, writes, and those that clear.
THREADS = 12


# Seconds for which a tier that is quick goes on, so that threads meet in the middle of its calls.
LEAST_S = 0.7


def turns(least: int) -> Iterator[int]:
    """Return numbers: at least so many, and for at least `LEAST_S`."""
    end = time.monotonic() + LEAST_S
    for turn in itertools.count():
        if turn >= least and time.monotonic() >= end:
            return
        yield turn


class ConcurrencyTests(TierKit):
    """A reader sees the whole value of one writer, or none. Values of these tests contain no zero byte, so that a part
    of a buffer that was not written shows.
    """

    def while_writing(self, write: Callable[[], None], *reads: Callable[[], None]) -> None:
        """Repeat `reads`, each in its own thread, until `write` has ended, and once more."""
        done = threading.Event()

        def repeat(read: Callable[[], None]) -> None:
            while not done.is_set():
                read()
            read()

        def finish() -> None:
            try:
                write()
            finally:
                done.set()

        self.in_threads(finish, *(lambda read=read: repeat(read) for read in reads))

    def read(self, tier: Tier, key: bytes, room: int) -> bytes | None:
        """Return the value under `key`, None if it is missing."""
        received, found = self.load(tier, key, room)
        if received is MISSING:
            return None
        assert not isinstance(received, Outcome), f"{received} of a key that is stored and deleted meanwhile"
        assert 0 not in found[:received], f"of {received} bytes that were received some are of no value"
        return found[:received]

    def test_threads_with_keys_of_their_own_do_not_mix_values(self, watched: Tier) -> None:
        def work(seed: int) -> None:
            keys = self.fresh_keys(4)
            for turn in range(10):
                values = [bytes([seed, turn + 1, index + 1]) * (1 + 4001 * index) for index in range(len(keys))]
                assert watched.put(keys, self.parts_of(values), deadline=self.soon()) == [STORED] * len(keys)
                buffers = [bytearray(len(value)) for value in values]
                received = watched.get_into(keys, self.parts_of(buffers), deadline=self.soon())
                assert received == [len(value) for value in values], "another length than this thread stored"
                self.must_be(buffers, values, "another value than this thread stored")
                assert watched.contains(keys, deadline=self.soon()) == [FOUND] * len(keys)
            assert watched.delete(keys, deadline=self.soon()) == [DELETED] * len(keys)

        self.in_threads(*(lambda seed=seed: work(seed + 1) for seed in range(THREADS)))

    @sized
    def test_readers_see_the_value_of_one_writer(self, watched: Tier, rounds: int, size: int) -> None:
        keys = self.fresh_keys(2)
        # Values of each writer have a length of their own, too.
        lengths = {9: size, 1: size, 2: size + size // 3, 3: size // 2}
        for key in keys:
            self.store(watched, key, b"\x09" * size)

        def write(byte: int) -> None:
            for _ in turns(rounds):
                values = [bytes([byte]) * lengths[byte] for _ in keys]
                assert watched.put(keys, self.parts_of(values), deadline=self.soon()) == [STORED] * len(keys)

        def write_all() -> None:
            self.in_threads(*(lambda byte=byte: write(byte) for byte in (1, 2, 3)))

        def read() -> None:
            for key in keys:
                value = self.read(watched, key, 2 * size)
                assert value is not None, "a value that is replaced is missing meanwhile"
                assert len(set(value)) == 1, "bytes of several values in one"
                assert len(value) == lengths.get(value[0]), "the bytes of one value, and the length of another"

        self.while_writing(write_all, read, read)

    @sized
    def test_a_new_value_is_seen_whole_or_not_at_all(self, watched: Tier, rounds: int, size: int) -> None:
        value = b"\x05" * size
        at = self.fresh_keys(1)  # the key that is being written

        def write() -> None:
            for _ in turns(rounds):
                (key,) = at[:] = self.fresh_keys(1)
                self.store(watched, key, value)
                assert watched.contains([key], deadline=self.soon()) == [FOUND]

        def read() -> None:
            key = at[0]
            (found,) = watched.contains([key], deadline=self.soon())
            seen = self.read(watched, key, size)
            assert seen in (value, None), "a part of a value was visible"
            assert found is MISSING or seen is not None, "a value was found before it could be read"

        self.while_writing(write, read, read)

    @sized
    def test_readers_of_what_is_deleted_see_it_whole_or_missing(self, watched: Tier, rounds: int, size: int) -> None:
        keys, value = self.fresh_keys(3), b"\x07" * size

        def write() -> None:
            for _ in turns(rounds):
                assert watched.put(keys, self.parts_of([value] * 3), deadline=self.soon()) == [STORED] * 3
                assert watched.delete(keys, deadline=self.soon()) == [DELETED] * 3

        def read() -> None:
            for key in keys:
                assert self.read(watched, key, size) in (value, None), "a part of a value was visible"

        self.while_writing(write, read, read)

    def test_one_value_is_deleted_once(self, watched: Tier) -> None:
        keys = self.fresh_keys(60)
        assert watched.put(keys, self.parts_of([b"value"] * 60), deadline=self.soon()) == [STORED] * 60
        outcomes: list[object] = []
        at_once = threading.Barrier(3, timeout=self.patience_s)

        def delete() -> None:
            for key in keys:
                at_once.wait()
                outcomes.extend(watched.delete([key], deadline=self.soon()))

        self.in_threads(delete, delete, delete)
        told = {outcome: outcomes.count(outcome) for outcome in (DELETED, MISSING)}
        assert told == {DELETED: 60, MISSING: 120}, "of three threads that delete a value one deletes it"

    def test_touching_undoes_no_other_call(self, watched: Tier) -> None:
        """A touch that writes a value back revives what was deleted, or undoes what was stored meanwhile."""
        if "touch" not in watched.capabilities():
            pytest.skip("the tier has no touch")
        stored, deleted = self.fresh_keys(2)
        self.store(watched, stored, b"first")

        def write() -> None:
            for turn in turns(150):
                value = b"turn %d" % turn
                self.store(watched, stored, value)
                self.must_load(watched, stored, value, "a touch undid a put")
                self.store(watched, deleted, value)
                assert watched.delete([deleted], deadline=self.soon()) == [DELETED]
                assert watched.contains([deleted], deadline=self.soon()) == [MISSING], "a touch undid a delete"

        def touch() -> None:
            watched.touch([stored, deleted], deadline=self.soon())

        self.while_writing(write, touch, touch)

    def test_every_value_of_concurrent_writers_is_kept(self, watched: Tier) -> None:
        def work(seed: int, kept: list[tuple[bytes, bytes]]) -> None:
            for turn in turns(100):
                (key,) = self.fresh_keys(1)
                self.store(watched, key, b"%d.%d" % (seed, turn))
                kept.append((key, b"%d.%d" % (seed, turn)))

        kept: list[tuple[bytes, bytes]] = []
        self.in_threads(*(lambda seed=seed: work(seed, kept) for seed in range(6)))
        for key, value in kept:
            self.must_load(watched, key, value, "a value that was stored beside others is lost")
