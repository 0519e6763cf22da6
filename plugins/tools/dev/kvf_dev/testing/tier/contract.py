"""Tests of single values and of batches, and of a tier's own claims: a stored value comes back, a missing key is an
answer rather than an error, each key has one outcome, in order."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvf_dev.testing.kit import must_be_equal
from kvf_dev.testing.tier.kit import DAMAGED, DELETED, FOUND, MISSING, STORED, TierKit, WatchedTier, parts_of
from kvframework.api.keys import PACKED_KEY_BYTES
from kvframework.api.tier import OPTIONAL_METHODS, Outcome, PackedKey
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
# Bytes of other objects beside a value in the arena, and how many.
_GUARD, _GAP = b"\xa5", 64
# More than a LOOKUP has, and than a statement of a database takes.
MANY = 33_000

# Few keys, so that batches share them; a few lengths, so that buffers are too small, too large and exact.
KEYS = st.integers(0, 5)
LENGTHS = st.sampled_from([0, 1, 2, 3, 17, 4096, 70_000])
KEY_BATCHES = st.lists(KEYS, max_size=8)
SIZED_BATCHES = st.lists(st.tuples(KEYS, LENGTHS), max_size=8)


class ContractTests(TierKit):
    """Values, their lengths, and the buffers that carry them."""

    @pytest.mark.parametrize(
        "value", [*_SIZES, *_PECULIAR], ids=[*_SIZES, *map("peculiar {}".format, range(len(_PECULIAR)))]
    )
    def test_a_value_comes_back_as_it_was_stored(self, watched: WatchedTier, value: int | bytes) -> None:
        (key,) = self.fresh_keys(1)
        value = os.urandom(value) if isinstance(value, int) else value
        assert [watched.contains([key]), watched.delete([key])] == [[MISSING], [MISSING]]
        watched.must_answer(key, len(value), MISSING)
        watched.touch([key])
        watched.store(key, value)
        assert watched.contains([key]) == [FOUND]
        watched.must_load(key, value)
        again = os.urandom(len(value))
        watched.store(key, again)
        watched.must_load(key, again, "`get_into` returned an older value of the same length")

    def test_parts_are_one_value(self, watched: WatchedTier) -> None:
        (key,) = self.fresh_keys(1)
        pieces = [os.urandom(size) for size in (1, 70_000, 0, 13, 1 << 20)]
        value = b"".join(pieces)
        readonly = [memoryview(b"<%b>" % piece)[1:-1] for piece in pieces]
        assert watched.put([key], [readonly]) == [STORED]
        watched.must_load(key, value)
        out = bytearray(len(value))
        cuts = [0, 5, 5, 900_000, len(value)]
        parts = [memoryview(out)[start:end] for start, end in itertools.pairwise(cuts)]
        assert watched.get_into([key], [parts]) == [len(value)]
        must_be_equal(out, value, "`get_into` returned other bytes")

    def test_different_keys_are_different(self, watched: WatchedTier) -> None:
        """Keys that differ in one bit, and keys that differ in letter case, padding or separators alone."""
        base = os.urandom(PACKED_KEY_BYTES)
        flips = [(bytes([base[at] ^ flip]), at) for at in range(len(base)) for flip in (0xFF, 0x01, 0x20, 0x80)]
        alike = [(bytes([byte]) * 3, at) for byte in _ALIKE for at in (0, 40, PACKED_KEY_BYTES - 3)]
        keys = sorted({base[:at] + piece + base[at + len(piece) :] for piece, at in flips + alike} - {base})
        values = {key: b"%d of %d" % (index, len(keys)) for index, key in enumerate(keys)}
        watched.store_all(values)
        assert watched.contains([base]) == [MISSING], "`contains` found a key that is only similar to stored ones"
        watched.store(base, b"base")
        for key, value in values.items():
            watched.must_load(key, value, "`get_into` returned the value of another key, which is similar")
        assert watched.delete(keys) == [DELETED] * len(keys)
        watched.must_load(base, b"base", "`delete` of one key deleted another one, which is similar")

    @pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 100_001])
    def test_nothing_beside_the_parts_is_written(self, watched: WatchedTier, nbytes: int) -> None:
        """The parts are pieces of L1, a mapping: bytes before, between and behind them are those of other objects."""
        exact, shorter, longer, _ = keys = self.fresh_keys(4)
        value = os.urandom(nbytes)
        watched.store_all({exact: value, shorter: value[: nbytes // 2], longer: value + bytes(200)})
        with mmap.mmap(-1, len(keys) * (2 * _GAP + nbytes) + _GAP) as arena, memoryview(arena) as whole:
            whole[:] = _GUARD * len(whole)
            at, parts = 1, []
            for _ in keys:
                first, last = at + _GAP, at + 2 * _GAP + nbytes // 3
                at = last + nbytes - nbytes // 3
                parts.append([whole[first : first + nbytes // 3], whole[last:at]])
            received = watched.get_into(keys, parts)
            assert received == [nbytes, nbytes // 2, DAMAGED, MISSING]
            for part in itertools.chain(*parts):
                part[:] = _GUARD * len(part)
                part.release()
            untouched = bytes(whole).count(_GUARD) == len(whole)
        assert untouched, "`get_into` wrote bytes outside the given parts"

    def test_memory_stays_the_callers(self, watched: WatchedTier) -> None:
        """Neither a call that succeeded keeps some of it, nor one that failed."""
        keys = self.fresh_keys(3)
        sources, targets = ([_Tracked(b"m" * 50_000) for _ in keys] for _ in range(2))
        gone = [weakref.ref(memory) for memory in sources + targets]
        assert watched.put(keys, parts_of(sources)) == [STORED] * 3
        for source in sources:
            source[:] = bytes(50_000)
        assert watched.get_into(keys, parts_of(targets)) == [50_000] * 3
        for target in targets:
            must_be_equal(target, b"m" * 50_000, "The tier stored bytes that the caller wrote after put had returned")
        watched.get_into(keys, [[memoryview(each)[:10]] for each in targets])
        for call in (watched.put, watched.get_into):
            for deadline in (0.0, time.monotonic() + 0.0005):
                with contextlib.suppress(TierError):
                    call(keys, parts_of(targets), deadline=deadline)
        watched.close()
        with contextlib.suppress(TierError):
            watched.put(keys, parts_of(sources))
        del source, sources, target, targets
        gc.collect()
        assert not any(memory() is not None for memory in gone), "The tier keeps a reference to the caller's memory"


class _Tracked(bytearray):
    """Memory whose release a test can observe through a weak reference."""


class ClaimTests(TierKit):
    """An optional method is tested for its promises in the module of its own name."""

    def test_it_has_a_name(self, watched: WatchedTier) -> None:
        self.must_be_named(watched.name)

    def test_its_capabilities_are_optional_methods(self, watched: WatchedTier) -> None:
        answer = watched.capabilities()
        assert isinstance(answer, frozenset), f"`capabilities` returned a {type(answer).__name__}, not a frozenset"
        unknown = sorted(answer - set(OPTIONAL_METHODS))
        assert not unknown, f"`capabilities` has unknown names: {', '.join(unknown)}"


class BatchTests(TierKit):
    """Batches of distinct keys, and batches that name a key twice, which are applied in order."""

    def test_as_many_keys_as_a_request_has_are_looked_up_at_once(self, watched: WatchedTier) -> None:
        keys = self.fresh_keys(MANY)
        known = [keys[0], keys[MANY // 2], keys[-1]]
        assert watched.put(tuple(known), parts_of([b"value"] * 3)) == [STORED] * 3
        found = watched.contains(tuple(keys))
        wrong = [index for index, key in enumerate(keys) if found[index] is not (FOUND if key in known else MISSING)]
        assert not wrong, f"Wrong outcomes of {len(wrong)} of {MANY} keys, first {found[wrong[0]]} at {wrong[0]}"

    @pytest.mark.parametrize("count", [2, 700])
    def test_outcomes_keep_the_order_of_a_mixed_batch(self, watched: WatchedTier, count: int) -> None:
        keys = self.fresh_keys(count)
        values = {key: b"%d of %d" % (index, count) for index, key in enumerate(keys) if index % 3 != 1}
        watched.store_all(values)
        expected = [FOUND if key in values else MISSING for key in keys]
        assert watched.contains(keys) == expected
        buffers = [bytearray(len(values.get(key, b"none"))) for key in keys]
        received = [len(values[key]) if key in values else MISSING for key in keys]
        assert watched.get_into(keys, parts_of(buffers)) == received
        for key, buffer in zip(keys, buffers, strict=True):
            must_be_equal(buffer, values.get(key, buffer), "`get_into` returned other bytes")
        expected = [DELETED if key in values else MISSING for key in keys]
        assert watched.delete(keys) == expected


class ModelTests(TierKit):
    """The comparison with a dict: hypothesis generates sequences of batches, and shrinks one that differs."""

    def test_it_behaves_like_a_dict(self, watched: WatchedTier) -> None:
        class Machine(TierMachine):
            kit, tier = self, watched

        self.must_behave(Machine, examples=self.examples, steps=15)


class TierMachine(RuleBasedStateMachine):
    """One sequence of batches, on its own keys. A key that occurs twice in a batch is processed twice, in order."""

    kit: ClassVar[TierKit]
    tier: ClassVar[WatchedTier]

    def __init__(self) -> None:
        super().__init__()
        self._keys = self.kit.fresh_keys(6)
        self._model: dict[PackedKey, bytes] = {}
        self._stored = 0

    @rule(batch=SIZED_BATCHES)
    def put(self, batch: list[tuple[int, int]]) -> None:
        keys, values = [], []
        for index, nbytes in batch:
            self._stored += 1
            keys.append(self._keys[index])
            values.append((b"%d." % self._stored * nbytes)[:nbytes])
        assert self.tier.put(keys, parts_of(values)) == [Outcome.STORED] * len(batch)
        self._model.update(zip(keys, values, strict=True))

    @rule(batch=SIZED_BATCHES)
    def get(self, batch: list[tuple[int, int]]) -> None:
        keys, buffers = [self._keys[index] for index, _ in batch], [bytearray(b"\xa5" * nbytes) for _, nbytes in batch]
        outcomes = self.tier.get_into(keys, parts_of(buffers))
        assert outcomes == [self._expected(key, len(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
        for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
            if not isinstance(outcome, Outcome):
                must_be_equal(buffer[:outcome], self._model[key], "`get_into` returned other bytes")

    @rule(batch=KEY_BATCHES)
    def delete(self, batch: list[int]) -> None:
        keys = [self._keys[index] for index in batch]
        expected = [MISSING if self._model.pop(key, None) is None else DELETED for key in keys]
        assert self.tier.delete(keys) == expected

    @rule(batch=KEY_BATCHES)
    def contains(self, batch: list[int]) -> None:
        keys = [self._keys[index] for index in batch]
        assert self.tier.contains(keys) == self._outcomes(keys)

    @rule(batch=KEY_BATCHES)
    def touch(self, batch: list[int]) -> None:
        self.tier.touch([self._keys[index] for index in batch])
        assert self.tier.contains(self._keys) == self._outcomes(self._keys)

    @rule()
    def scan(self) -> None:
        if "scan" not in self.tier.capabilities():
            return
        sizes = {key: len(value) for key, value in self._model.items()}
        found = {key: entry.nbytes for key, entry in self.tier.listed(self._keys).items()}
        assert found.keys() <= sizes.keys(), "`scan` lists a deleted value"
        missing = len(sizes) - len(found)
        assert not missing, f"`scan` does not list {missing} of {len(sizes)} values"
        wrong = [key for key, nbytes in found.items() if nbytes != sizes[key]]
        assert not wrong, f"`scan` lists a value of {sizes[wrong[0]]} bytes with {found[wrong[0]]} bytes"

    def teardown(self) -> None:
        self.tier.delete(self._keys)

    def _outcomes(self, keys: Sequence[PackedKey]) -> list[Outcome]:
        return [FOUND if key in self._model else MISSING for key in keys]

    def _expected(self, key: PackedKey, nbytes: int) -> int | Outcome:
        if key not in self._model:
            return MISSING
        return DAMAGED if len(self._model[key]) > nbytes else len(self._model[key])
