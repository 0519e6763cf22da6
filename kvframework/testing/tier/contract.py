"""Tests of single values: a stored value comes back, and a missing key is an answer rather than an error."""

from __future__ import annotations

import itertools
import os

import pytest

from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.tier import Tier
from kvframework.testing.tier.kit import DAMAGED, DELETED, FOUND, MISSING, STORED, TierKit


class ContractTests(TierKit):
    """Values, their lengths, and the buffers that carry them."""

    @pytest.mark.parametrize("nbytes", [1, 2, 255, 4096, 16 * 1024 - 1, 65_537, 1 << 20, (3 << 20) + 5])
    def test_a_value_comes_back_as_it_was_stored(self, tier: Tier, nbytes: int) -> None:
        (key,) = self.fresh_keys(1)
        value = os.urandom(nbytes)
        self.store(tier, key, value)
        assert tier.contains([key], deadline=self.soon()) == [FOUND]
        received, found = self.load(tier, key, nbytes)
        assert received == nbytes
        self.must_be([found], [value])

    def test_a_value_that_looks_like_a_protocol_comes_back(self, tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        value = b"\r\n$-1\r\n+OK\r\n\0\xff" * 3
        self.store(tier, key, value)
        self.must_load(tier, key, value)

    def test_a_missing_key_is_an_answer(self, tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        assert tier.contains([key], deadline=self.soon()) == [MISSING]
        assert self.load(tier, key, 100)[0] is MISSING
        assert tier.delete([key], deadline=self.soon()) == [MISSING]
        tier.touch([key], deadline=self.soon())

    @pytest.mark.parametrize("parts", [[], [memoryview(b"")], [memoryview(b""), memoryview(b"")]], ids=len)
    def test_an_empty_value_is_found(self, tier: Tier, parts: list[memoryview]) -> None:
        (key,) = self.fresh_keys(1)
        assert tier.put([key], [parts], deadline=self.soon()) == [STORED]
        assert tier.contains([key], deadline=self.soon()) == [FOUND]
        self.must_load(tier, key, b"")
        assert self.load(tier, key, 5)[0] == 0
        assert tier.get_into([key], [[]], deadline=self.soon()) == [0]
        assert tier.delete([key], deadline=self.soon()) == [DELETED]
        assert tier.contains([key], deadline=self.soon()) == [MISSING]

    def test_parts_are_one_value(self, tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        pieces = [os.urandom(size) for size in (1, 70_000, 0, 13, 1 << 20)]
        value = b"".join(pieces)
        readonly = [memoryview(piece) for piece in pieces]
        assert tier.put([key], [readonly], deadline=self.soon()) == [STORED]
        self.must_load(tier, key, value)
        out = bytearray(len(value))
        cuts = [0, 5, 5, 900_000, len(value)]
        parts = [memoryview(out)[start:end] for start, end in itertools.pairwise(cuts)]
        assert tier.get_into([key], [parts], deadline=self.soon()) == [len(value)]
        self.must_be([out], [value])

    def test_many_small_parts_are_one_value(self, tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        value = os.urandom(5000)
        parts = [memoryview(value)[at : at + 2] for at in range(0, len(value), 2)]
        assert tier.put([key], [parts], deadline=self.soon()) == [STORED]
        out = bytearray(len(value))
        parts = [memoryview(out)[at : at + 2] for at in range(0, len(value), 2)]
        assert tier.get_into([key], [parts], deadline=self.soon()) == [len(value)]
        self.must_be([out], [value])

    @pytest.mark.parametrize("value", [b"new", b"new value, and much longer than the old one", b""], ids=len)
    def test_storing_again_replaces(self, tier: Tier, value: bytes) -> None:
        (key,) = self.fresh_keys(1)
        self.store(tier, key, b"old value, and longer")
        self.store(tier, key, value)
        self.must_load(tier, key, value)

    def test_keys_that_differ_in_one_bit_are_different(self, tier: Tier) -> None:
        for at in (0, 15, 16, 31, 32, 36, 40, PACKED_KEY_BYTES - 1):
            for bit in (0x01, 0x20, 0x80):
                (one,) = self.fresh_keys(1)
                other = one[:at] + bytes([one[at] ^ bit]) + one[at + 1 :]
                self.store(tier, one, b"one")
                assert tier.contains([other], deadline=self.soon()) == [MISSING], (at, bit)
                self.store(tier, other, b"other")
                self.must_load(tier, one, b"one")
                self.must_load(tier, other, b"other")
                assert tier.delete([one], deadline=self.soon()) == [DELETED], (at, bit)
                self.must_load(tier, other, b"other")

    @pytest.mark.parametrize("filler", [b"\0", b"\xff", b"/", b".", b"\r\n", b"*", b"{}", b"%s"], ids=repr)
    def test_any_byte_may_be_in_a_key(self, tier: Tier, filler: bytes) -> None:
        own = self.fresh_keys(1)[0][:16]
        key = own + (filler * PACKED_KEY_BYTES)[: PACKED_KEY_BYTES - len(own)]
        self.store(tier, key, filler)
        assert tier.contains([key], deadline=self.soon()) == [FOUND]
        self.must_load(tier, key, filler)
        assert tier.delete([key], deadline=self.soon()) == [DELETED]

    def test_a_deleted_value_is_missing(self, tier: Tier) -> None:
        gone, never = self.fresh_keys(2)
        self.store(tier, gone, b"x" * 1000)
        assert tier.delete([gone, never], deadline=self.soon()) == [DELETED, MISSING]
        assert tier.contains([gone], deadline=self.soon()) == [MISSING]
        assert self.load(tier, gone, 1000)[0] is MISSING
        assert tier.delete([gone], deadline=self.soon()) == [MISSING]
        self.store(tier, gone, b"again")
        self.must_load(tier, gone, b"again")

    @pytest.mark.parametrize("nbytes", [0, 1, 99, 5000, 65_537, 3 << 20])
    def test_a_shorter_value_fills_the_beginning_and_its_length_is_told(self, tier: Tier, nbytes: int) -> None:
        """The rest of the parts may hold bytes of an older value, which must not pass for the new one's."""
        (key,) = self.fresh_keys(1)
        older = os.urandom(nbytes + 70)
        self.store(tier, key, older[:nbytes])
        out = bytearray(older)
        parts = [memoryview(out)[:30], memoryview(out)[30:]]
        assert tier.get_into([key], [parts], deadline=self.soon()) == [nbytes], "another length than came"
        self.must_be([out[:nbytes]], [older[:nbytes]])

    @pytest.mark.parametrize("nbytes", [1, 101, 50_000, 3 << 20])
    def test_a_longer_value_is_damaged(self, tier: Tier, nbytes: int) -> None:
        (key,) = self.fresh_keys(1)
        value = os.urandom(nbytes)
        self.store(tier, key, value)
        assert self.load(tier, key, min(nbytes - 1, 100))[0] is DAMAGED
        self.must_load(tier, key, value, "reading it with too small a buffer changed it")

    def test_asking_changes_nothing(self, tier: Tier) -> None:
        known, unknown = self.fresh_keys(2)
        self.store(tier, known, b"value")
        for _ in range(3):
            assert tier.contains([known, unknown], deadline=self.soon()) == [FOUND, MISSING]
            self.must_load(tier, known, b"value")
            assert self.load(tier, unknown, 5)[0] is MISSING

    def test_touching_changes_no_value_and_makes_none(self, tier: Tier) -> None:
        known, unknown = self.fresh_keys(2)
        self.store(tier, known, b"value")
        tier.touch([known, unknown], deadline=self.soon())
        tier.touch([], deadline=self.soon())
        assert tier.contains([known, unknown], deadline=self.soon()) == [FOUND, MISSING]
        self.must_load(tier, known, b"value")

    def test_a_ping_of_a_working_tier_is_silent(self, tier: Tier) -> None:
        tier.ping(deadline=self.soon())

    def test_buffers_stay_the_callers(self, tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        source, target = bytearray(os.urandom(100_000)), bytearray(100_000)
        value = bytes(source)
        with memoryview(source) as view:
            assert tier.put([key], [[view]], deadline=self.soon()) == [STORED]
        source.clear()  # raises BufferError if the tier still holds a view
        with memoryview(target) as view:
            assert tier.get_into([key], [[view]], deadline=self.soon()) == [len(value)]
        self.must_be([target], [value])
        target.clear()
        self.must_load(tier, key, value)

    def test_what_becomes_of_a_buffer_does_not_matter(self, tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        source = bytearray(b"a" * 5000)
        assert tier.put([key], self.parts_of([source]), deadline=self.soon()) == [STORED]
        source[:] = b"b" * 5000
        self.must_load(tier, key, b"a" * 5000)
        target = bytearray(5000)
        assert tier.get_into([key], self.parts_of([target]), deadline=self.soon()) == [5000]
        target[:] = b"c" * 5000
        self.must_load(tier, key, b"a" * 5000)
