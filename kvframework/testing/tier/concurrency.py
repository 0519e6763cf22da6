"""Tests of several threads on one tier, as the server's storage threads use it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvframework.api.tier import Tier
from kvframework.testing.tier.kit import DELETED, FOUND, MISSING, STORED, TierKit

ROUNDS = 25


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

    def test_threads_with_keys_of_their_own_do_not_mix_values(self, tier: Tier) -> None:
        def work(seed: int) -> None:
            keys = self.fresh_keys(4)
            for turn in range(10):
                values = [bytes([seed, turn, index]) * (1 + 4001 * index) for index in range(len(keys))]
                assert tier.put(keys, self.parts_of(values), deadline=self.soon()) == [STORED] * len(keys)
                buffers = [bytearray(len(value)) for value in values]
                received = tier.get_into(keys, self.parts_of(buffers), deadline=self.soon())
                assert received == [len(value) for value in values]
                self.must_be(buffers, values)
                assert tier.contains(keys, deadline=self.soon()) == [FOUND] * len(keys)
            assert tier.delete(keys, deadline=self.soon()) == [DELETED] * len(keys)

        self.in_threads(*(lambda seed=seed: work(seed) for seed in range(6)))

    def test_readers_see_the_value_of_one_writer(self, tier: Tier) -> None:
        keys, size = self.fresh_keys(2), 100_000
        for key in keys:
            self.store(tier, key, b"\x09" * size)

        def write(byte: int) -> None:
            for _ in range(ROUNDS):
                values = [bytes([byte]) * size for _ in keys]
                assert tier.put(keys, self.parts_of(values), deadline=self.soon()) == [STORED] * len(keys)

        def write_all() -> None:
            self.in_threads(*(lambda byte=byte: write(byte) for byte in (1, 2, 3)))

        def read() -> None:
            buffers = [bytearray(size) for _ in keys]
            assert tier.get_into(keys, self.parts_of(buffers), deadline=self.soon()) == [size] * len(keys)
            for buffer in buffers:
                assert buffer == buffer[:1] * size, "bytes of several values, or of none, in one"
                assert buffer[0] in (1, 2, 3, 9)

        self.while_writing(write_all, read, read)

    def test_a_replacement_is_seen_whole_or_not_at_all(self, tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        short, long = b"\x01" * 1000, b"\x02" * 200_000
        self.store(tier, key, short)

        def write() -> None:
            for _ in range(ROUNDS):
                self.store(tier, key, long)
                self.store(tier, key, short)

        def read() -> None:
            received, found = self.load(tier, key, len(long))
            whole = {len(long): long, len(short): short}
            assert received in whole, "neither the old value's length nor the new one's"
            assert found.startswith(whole[received]), "neither the old value nor the new one"

        self.while_writing(write, read, read)

    def test_a_new_value_is_seen_whole_or_not_at_all(self, tier: Tier) -> None:
        keys, value = self.fresh_keys(ROUNDS), b"\x05" * 100_000

        def write() -> None:
            for key in keys:
                self.store(tier, key, value)

        def read() -> None:
            for key in keys:
                received, found = self.load(tier, key, len(value))
                assert received in (len(value), MISSING), "a part of a value was visible"
                if received is not MISSING:
                    self.must_be([found], [value], "a part of a value was visible")

        self.while_writing(write, read)
        assert tier.contains(keys, deadline=self.soon()) == [FOUND] * len(keys)

    def test_readers_of_what_is_deleted_see_it_whole_or_missing(self, tier: Tier) -> None:
        keys, value = self.fresh_keys(3), b"\x07" * 100_000

        def write() -> None:
            for _ in range(ROUNDS):
                assert tier.put(keys, self.parts_of([value] * 3), deadline=self.soon()) == [STORED] * 3
                assert tier.delete(keys, deadline=self.soon()) == [DELETED] * 3

        def read() -> None:
            buffers = [bytearray(len(value)) for _ in keys]
            outcomes = tier.get_into(keys, self.parts_of(buffers), deadline=self.soon())
            assert set(outcomes) <= {len(value), MISSING}, "a part of a value was visible"
            for outcome, buffer in zip(outcomes, buffers, strict=True):
                if outcome is not MISSING:
                    self.must_be([buffer], [value], "a part of a value was visible")

        self.while_writing(write, read, read)

    def test_one_value_is_deleted_once(self, tier: Tier) -> None:
        keys = self.fresh_keys(ROUNDS)
        for key in keys:
            self.store(tier, key, b"value")
        outcomes: list[object] = []
        at_once = threading.Barrier(3, timeout=self.patience_s)

        def delete() -> None:
            for key in keys:
                at_once.wait()
                outcomes.extend(tier.delete([key], deadline=self.soon()))

        self.in_threads(delete, delete, delete)
        assert outcomes.count(DELETED) == len(keys)
        assert outcomes.count(MISSING) == 2 * len(keys)
