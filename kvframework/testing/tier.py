"""Owns the conformance kit for L2 tiers: what every `Tier` must do. Runs under pytest, in the author's test process.

    import pytest
    from kvframework.testing.tier import TierConformance

    class TestMyTier(TierConformance):
        @pytest.fixture
        def tier(self):
            tier = MyTier(...)
            yield tier
            tier.close()

`pytest.register_assert_rewrite("kvframework.testing.tier")` before the import makes failures show their values.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvframework.api.keys import PACKED_KEY_BYTES, PackedKey
from kvframework.api.tier import Outcome, Tier
from kvframework.errors import TierError

FOUND, MISSING, STORED, DELETED, FAILED = (
    Outcome.FOUND,
    Outcome.MISSING,
    Outcome.STORED,
    Outcome.DELETED,
    Outcome.FAILED,
)


class TierConformance:
    """Subclass it and give a `tier` fixture. Keys are random, so the store may hold other things and be shared."""

    patience_s = 20.0  # the deadline of every call that should succeed

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        """A working tier; the fixture closes it."""
        raise NotImplementedError("give a `tier` fixture")

    # What the tests below are written in.

    def fresh_keys(self, count: int) -> list[PackedKey]:
        """Keys that the store does not hold; any byte may be in them."""
        return [os.urandom(PACKED_KEY_BYTES) for _ in range(count)]

    def soon(self) -> float:
        return time.monotonic() + self.patience_s

    def store(self, tier: Tier, key: PackedKey, value: bytes) -> None:
        assert tier.put([key], [[memoryview(value)]], deadline=self.soon()) == [STORED]

    def load(self, tier: Tier, key: PackedKey, nbytes: int) -> tuple[Outcome, bytes]:
        buffer = bytearray(nbytes)
        (outcome,) = tier.get_into([key], [[memoryview(buffer)]], deadline=self.soon())
        return outcome, bytes(buffer)

    # Values

    @pytest.mark.parametrize("nbytes", [1, 2, 255, 4096, 16 * 1024 - 1, 65_537, 1 << 20, (3 << 20) + 5])
    def test_a_value_comes_back_as_it_was_stored(self, tier: Tier, nbytes: int) -> None:
        (key,) = self.fresh_keys(1)
        value = os.urandom(nbytes)
        self.store(tier, key, value)
        assert tier.contains([key], deadline=self.soon()) == [FOUND]
        outcome, found = self.load(tier, key, nbytes)
        assert outcome is FOUND
        assert found == value

    def test_a_value_that_looks_like_a_protocol_comes_back(self, tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        value = b"\r\n$-1\r\n+OK\r\n\0\xff" * 3
        self.store(tier, key, value)
        assert self.load(tier, key, len(value)) == (FOUND, value)

    def test_parts_are_one_value(self, tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        pieces = [os.urandom(size) for size in (1, 70_000, 0, 13, 1 << 20)]
        value = b"".join(pieces)
        readonly = [memoryview(piece) for piece in pieces]
        assert tier.put([key], [readonly], deadline=self.soon()) == [STORED]
        assert self.load(tier, key, len(value)) == (FOUND, value)
        out = bytearray(len(value))
        cuts = [0, 5, 5, 900_000, len(value)]
        parts = [memoryview(out)[start:end] for start, end in itertools.pairwise(cuts)]
        assert tier.get_into([key], [parts], deadline=self.soon()) == [FOUND]
        assert bytes(out) == value

    def test_storing_again_replaces(self, tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(tier, key, b"old value, and longer")
        self.store(tier, key, b"new")
        assert self.load(tier, key, 3) == (FOUND, b"new")

    def test_a_deleted_value_is_missing(self, tier: Tier) -> None:
        gone, never = self.fresh_keys(2)
        self.store(tier, gone, b"x" * 1000)
        assert tier.delete([gone, never], deadline=self.soon()) == [DELETED, MISSING]
        assert tier.contains([gone], deadline=self.soon()) == [MISSING]
        assert self.load(tier, gone, 1000)[0] is MISSING
        assert tier.delete([gone], deadline=self.soon()) == [MISSING]

    def test_buffers_stay_the_callers(self, tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        source, target = bytearray(os.urandom(100_000)), bytearray(100_000)
        value = bytes(source)
        with memoryview(source) as view:
            assert tier.put([key], [[view]], deadline=self.soon()) == [STORED]
        source.clear()  # raises BufferError if the tier still holds a view
        with memoryview(target) as view:
            assert tier.get_into([key], [[view]], deadline=self.soon()) == [FOUND]
        assert target == value
        target.clear()
        assert self.load(tier, key, len(value)) == (FOUND, value)

    # Batches

    def test_an_empty_batch_has_no_outcomes(self, tier: Tier) -> None:
        assert tier.contains([], deadline=self.soon()) == []
        assert tier.put([], [], deadline=self.soon()) == []
        assert tier.get_into([], [], deadline=self.soon()) == []
        assert tier.delete([], deadline=self.soon()) == []

    @pytest.mark.parametrize("count", [2, 700])
    def test_outcomes_keep_the_order_of_a_mixed_batch(self, tier: Tier, count: int) -> None:
        keys = self.fresh_keys(count)
        values = {key: b"%d of %d" % (index, count) for index, key in enumerate(keys) if index % 3 != 1}
        outcomes = tier.put(list(values), [[memoryview(value)] for value in values.values()], deadline=self.soon())
        assert outcomes == [STORED] * len(values)
        expected = [FOUND if key in values else MISSING for key in keys]
        assert tier.contains(keys, deadline=self.soon()) == expected
        buffers = [bytearray(len(values.get(key, b"none"))) for key in keys]
        assert tier.get_into(keys, self.parts_of(buffers), deadline=self.soon()) == expected
        for key, buffer in zip(keys, buffers, strict=True):
            assert key not in values or bytes(buffer) == values[key]

    def test_a_batch_of_large_values(self, tier: Tier) -> None:
        keys = self.fresh_keys(10)
        values = [os.urandom(1000) * 3000 for _ in keys]
        parts = [[memoryview(value)] for value in values]
        assert tier.put(keys, parts, deadline=self.soon()) == [STORED] * len(keys)
        buffers = [bytearray(len(value)) for value in values]
        assert tier.get_into(keys, self.parts_of(buffers), deadline=self.soon()) == [FOUND] * len(keys)
        assert buffers == values
        assert tier.delete(keys, deadline=self.soon()) == [DELETED] * len(keys)

    @pytest.mark.parametrize("stored", [1, 99, 101, 50_000])
    def test_another_length_fails_that_key_only(self, tier: Tier, stored: int) -> None:
        before, wrong, after = keys = self.fresh_keys(3)
        self.store(tier, before, b"b" * 100)
        self.store(tier, wrong, b"w" * stored)
        self.store(tier, after, b"a" * 100)
        buffers = [bytearray(100) for _ in keys]
        assert tier.get_into(keys, self.parts_of(buffers), deadline=self.soon()) == [FOUND, FAILED, FOUND]
        assert (bytes(buffers[0]), bytes(buffers[2])) == (b"b" * 100, b"a" * 100)
        assert self.load(tier, wrong, stored) == (FOUND, b"w" * stored)

    # Life

    def test_a_passed_deadline_fails_at_once(self, tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(tier, key, b"value")
        buffer = bytearray(5)
        started, past = time.monotonic(), time.monotonic() - 1.0
        with pytest.raises(TierError):
            tier.contains([key], deadline=past)
        with pytest.raises(TierError):
            tier.get_into([key], [[memoryview(buffer)]], deadline=past)
        with pytest.raises(TierError):
            tier.put([key], [[memoryview(b"other")]], deadline=past)
        with pytest.raises(TierError):
            tier.delete([key], deadline=past)
        assert time.monotonic() - started < 2.0
        assert self.load(tier, key, 5) == (FOUND, b"value")

    def test_ping_and_touch(self, tier: Tier) -> None:
        known, unknown = self.fresh_keys(2)
        self.store(tier, known, b"value")
        tier.ping(deadline=self.soon())
        tier.touch([known, unknown], deadline=self.soon())
        assert tier.contains([known, unknown], deadline=self.soon()) == [FOUND, MISSING]

    def test_threads_do_not_mix_values(self, tier: Tier) -> None:
        def worker(seed: int) -> None:
            keys = self.fresh_keys(4)
            for turn in range(10):
                values = [bytes([seed, turn, index]) * (1 + 4001 * index) for index in range(len(keys))]
                parts = [[memoryview(value)] for value in values]
                assert tier.put(keys, parts, deadline=self.soon()) == [STORED] * len(keys)
                buffers = [bytearray(len(value)) for value in values]
                assert tier.get_into(keys, self.parts_of(buffers), deadline=self.soon()) == [FOUND] * len(keys)
                assert buffers == values

        with ThreadPoolExecutor(6) as threads:
            for result in [threads.submit(worker, seed) for seed in range(6)]:
                result.result(self.patience_s * 2)

    def test_a_closed_tier_fails_every_call(self, tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(tier, key, b"value")
        tier.close()
        tier.close()
        with pytest.raises(TierError):
            tier.contains([key], deadline=self.soon())
        with pytest.raises(TierError):
            tier.get_into([key], [[memoryview(bytearray(5))]], deadline=self.soon())
        with pytest.raises(TierError):
            tier.put([key], [[memoryview(b"value")]], deadline=self.soon())
        with pytest.raises(TierError):
            tier.delete([key], deadline=self.soon())
        with pytest.raises(TierError):
            tier.ping(deadline=self.soon())

    def parts_of(self, buffers: Sequence[bytearray]) -> list[list[memoryview]]:
        return [[memoryview(buffer)] for buffer in buffers]
