"""Tests of single values and of batches, and of a tier's own claims: a stored value comes back, a missing key is an
answer rather than an error, each key has one outcome, in order."""

from __future__ import annotations

import itertools
import mmap
import os

import pytest

from kvf_dev.testing.tier.kit import DAMAGED, DELETED, FOUND, MISSING, STORED, TierKit
from kvf_dev.testing.tier.watched import due, said
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.tier import OPTIONAL_METHODS, Tier
from kvframework.errors import TierError

_SIZES = [1, 2, 255, 256, 4095, 4096, 4097, 16_383, 65_535, 65_536, 65_537, 1 << 20, (3 << 20) + 5]
# What looks like a protocol, text, a number, the end of a line, nothing, or packed data.
_PECULIAR = [
    b"\r\n$-1\r\n+OK\r\n\0\xff" * 3,
    bytes(20_000),
    b"value\0\0\0",
    b"\0\0value",
    b" \tvalue \n",
    b"\xff\xfe\xc3(",
    b"12345",
    b"None",
    b"\x1f\x8b\x08 no gzip",
    b"\x80\x04N.",
]
# Bytes that encodings, cases, paddings, patterns and names of files take for one another.
_ALIKE = b"aA\0 \n\xff\xfe/_+-.\r%*\x01\x7f0O:;{}"
_GUARD = b"\xa5" * 64


class ContractTests(TierKit):
    """Values, their lengths, and the buffers that carry them."""

    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_a_value_comes_back_as_it_was_stored(self, watched: Tier, nbytes: int) -> None:
        (key,) = self.fresh_keys(1)
        value = os.urandom(nbytes)
        self.store(watched, key, value)
        assert watched.contains([key], deadline=self.soon()) == [FOUND]
        received, found = self.load(watched, key, nbytes)
        assert received == nbytes, f"get_into answered {said(received)}; {due(nbytes)}"
        self.must_be([found], [value])
        again = os.urandom(nbytes)
        self.store(watched, key, again)
        self.must_load(watched, key, again, "an older value of the same length")

    @pytest.mark.parametrize("value", _PECULIAR, ids=range(len(_PECULIAR)))
    def test_a_peculiar_value_comes_back(self, watched: Tier, value: bytes) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, value)
        self.must_load(watched, key, value)

    def test_a_missing_key_is_an_answer(self, watched: Tier) -> None:
        (key,) = self.fresh_keys(1)
        assert watched.contains([key], deadline=self.soon()) == [MISSING]
        self.must_answer(watched, key, 100, MISSING)
        assert watched.delete([key], deadline=self.soon()) == [MISSING]
        watched.touch([key], deadline=self.soon())

    def test_parts_are_one_value(self, watched: Tier) -> None:
        (key,) = self.fresh_keys(1)
        pieces = [os.urandom(size) for size in (1, 70_000, 0, 13, 1 << 20)]
        value = b"".join(pieces)
        readonly = [memoryview(b"<%b>" % piece)[1:-1] for piece in pieces]
        assert watched.put([key], [readonly], deadline=self.soon()) == [STORED]
        self.must_load(watched, key, value)
        out = bytearray(len(value))
        cuts = [0, 5, 5, 900_000, len(value)]
        parts = [memoryview(out)[start:end] for start, end in itertools.pairwise(cuts)]
        assert watched.get_into([key], [parts], deadline=self.soon()) == [len(value)]
        self.must_be([out], [value])

    def test_keys_that_look_alike_are_different(self, watched: Tier) -> None:
        base = os.urandom(PACKED_KEY_BYTES - 3)
        places = [(bytes([byte]) * 3, at) for byte in _ALIKE for at in (0, 40, PACKED_KEY_BYTES - 3)]
        keys = sorted({base[:at] + piece + base[at:] for piece, at in places})
        self.must_be_different(watched, keys, "these differ in letters of another case, padding or separators")

    def test_every_byte_of_a_key_counts(self, watched: Tier) -> None:
        base = os.urandom(PACKED_KEY_BYTES)
        keys = [
            base[:at] + bytes([base[at] ^ flip]) + base[at + 1 :]
            for at in range(PACKED_KEY_BYTES)
            for flip in (0xFF, 0x01, 0x20, 0x80)
        ]
        self.must_be_different(watched, [base, *keys], "these differ in one byte each")

    def must_be_different(self, tier: Tier, keys: list[bytes], why: str) -> None:
        values = [b"%d of %d" % (index, len(keys)) for index in range(len(keys))]
        assert tier.put(keys[1:], self.parts_of(values[1:]), deadline=self.soon()) == [STORED] * (len(keys) - 1)
        (found,) = tier.contains(keys[:1], deadline=self.soon())
        assert found is MISSING, f"{found} of a key that was never stored: {why}"
        self.store(tier, keys[0], values[0])
        for key, value in zip(keys, values, strict=True):
            self.must_load(tier, key, value, f"one key's value under another key: {why}")
        assert tier.delete(keys[1:], deadline=self.soon()) == [DELETED] * (len(keys) - 1), why
        self.must_load(tier, keys[0], values[0], f"deleted with another key: {why}")

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 100_001])
    def test_nothing_beside_the_parts_is_written(self, watched: Tier, nbytes: int) -> None:
        """The parts are pieces of L1, a mapping: bytes before, between and behind them are those of other objects."""
        exact, shorter, longer, _ = keys = self.fresh_keys(4)
        value = os.urandom(nbytes)
        for key, stored in ((exact, value), (shorter, value[: nbytes // 2]), (longer, value + bytes(200))):
            self.store(watched, key, stored)
        size = len(_GUARD) + nbytes
        with mmap.mmap(-1, len(keys) * (2 * size + len(_GUARD)) + 1) as arena, memoryview(arena) as whole:
            at, parts, beside = 1, list[list[memoryview]](), list[tuple[int, int]]()
            for _ in keys:
                cut = nbytes // 3
                parts.append([])
                for length in (cut, nbytes - cut):
                    whole[at : at + len(_GUARD)] = _GUARD
                    beside.append((at, at + len(_GUARD)))
                    at += len(_GUARD)
                    parts[-1].append(whole[at : at + length])
                    at += length
            whole[at : at + len(_GUARD)] = _GUARD
            beside.append((at, at + len(_GUARD)))
            received = watched.get_into(keys, parts, deadline=self.soon())
            assert received == [nbytes, nbytes // 2, DAMAGED, MISSING]
            written = [start for start, end in beside if whole[start:end] != _GUARD]
            del parts, received
            assert not written, "bytes of the arena beside the parts were written"

    def test_buffers_stay_the_callers(self, watched: Tier) -> None:
        (key,) = self.fresh_keys(1)
        source, target = bytearray(os.urandom(100_000)), bytearray(100_000)
        value = bytes(source)
        with memoryview(source) as view:
            assert watched.put([key], [[view]], deadline=self.soon()) == [STORED]
        source.clear()  # raises BufferError if the tier still holds a view
        with memoryview(target) as view:
            assert watched.get_into([key], [[view]], deadline=self.soon()) == [len(value)]
        self.must_be([target], [value])
        target.clear()
        self.must_load(watched, key, value)


class ClaimTests(TierKit):
    """An optional method is tested for its promises in the module of its own name."""

    def test_it_has_a_name(self, watched: Tier) -> None:
        self.must_be_named(watched.name)

    def test_its_capabilities_are_optional_methods(self, watched: Tier) -> None:
        answer = watched.capabilities()
        assert isinstance(answer, frozenset), f"capabilities answered a {type(answer).__name__}, no frozenset"
        unknown = sorted(answer - set(OPTIONAL_METHODS))
        assert not unknown, f"unknown: {', '.join(unknown)}; there are {', '.join(OPTIONAL_METHODS)}"

    def test_what_it_claims_to_have_it_has(self, watched: Tier) -> None:
        """A method of the base class, which is not overridden, keeps no promise."""
        calls = self.every_call(watched, self.fresh_keys(1)[0], self.soon)
        for name in sorted(watched.capabilities() & set(OPTIONAL_METHODS)):
            try:
                calls[name]()
            except TierError as error:
                pytest.fail(f"{name} is claimed, and raised: {error.fact}")


# More than a LOOKUP has, and than a statement of a database takes.
MANY = 33_000


class BatchTests(TierKit):
    """Batches of distinct keys, and batches that name a key twice, which are applied in order."""

    def test_as_many_keys_as_a_request_has_are_looked_up_at_once(self, watched: Tier) -> None:
        keys = self.fresh_keys(MANY)
        known = [keys[0], keys[MANY // 2], keys[-1]]
        assert watched.put(tuple(known), self.parts_of([b"value"] * 3), deadline=self.soon()) == [STORED] * 3
        found = watched.contains(tuple(keys), deadline=self.soon())
        wrong = [index for index, key in enumerate(keys) if found[index] is not (FOUND if key in known else MISSING)]
        assert not wrong, f"{len(wrong)} of {MANY} keys, the first at {wrong[0]}: {found[wrong[0]]}"

    @pytest.mark.parametrize("count", [2, 700])
    def test_outcomes_keep_the_order_of_a_mixed_batch(self, watched: Tier, count: int) -> None:
        keys = self.fresh_keys(count)
        values = {key: b"%d of %d" % (index, count) for index, key in enumerate(keys) if index % 3 != 1}
        outcomes = watched.put(list(values), self.parts_of(list(values.values())), deadline=self.soon())
        assert outcomes == [STORED] * len(values)
        expected = [FOUND if key in values else MISSING for key in keys]
        assert watched.contains(keys, deadline=self.soon()) == expected
        buffers = [bytearray(len(values.get(key, b"none"))) for key in keys]
        received = [len(values[key]) if key in values else MISSING for key in keys]
        assert watched.get_into(keys, self.parts_of(buffers), deadline=self.soon()) == received
        for key, buffer in zip(keys, buffers, strict=True):
            self.must_be([buffer], [values.get(key, buffer)])
        expected = [DELETED if key in values else MISSING for key in keys]
        assert watched.delete(keys, deadline=self.soon()) == expected
