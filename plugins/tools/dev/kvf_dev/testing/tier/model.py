"""The comparison of a tier with a dict: hypothesis generates sequences of batches, and shrinks one that differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvf_dev.testing.kit import must_be_equal
from kvf_dev.testing.tier.kit import DAMAGED, DELETED, FOUND, MISSING, TierKit
from kvf_dev.testing.tier.watched import WatchedTier, parts_of
from kvframework.api.tier import Outcome, PackedKey

STEPS = 15

# Few keys, so that batches share them; a few lengths, so that buffers are too small, too large and exact.
KEYS = st.integers(0, 5)
LENGTHS = st.sampled_from([0, 1, 2, 3, 17, 4096, 70_000])
KEY_BATCHES = st.lists(KEYS, max_size=8)
SIZED_BATCHES = st.lists(st.tuples(KEYS, LENGTHS), max_size=8)


class ModelTests(TierKit):
    def test_it_behaves_like_a_dict(self, watched: WatchedTier) -> None:
        class Machine(TierMachine):
            kit, tier = self, watched

        self.must_behave(Machine, examples=self.examples, steps=STEPS)


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
                must_be_equal(buffer[:outcome], self._model[key], "other bytes")

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
        assert found.keys() <= sizes.keys(), "a value that was deleted is listed"
        missing = len(sizes) - len(found)
        assert not missing, f"{missing} of {len(sizes)} values are not listed"
        wrong = [key for key, nbytes in found.items() if nbytes != sizes[key]]
        assert not wrong, f"a value of {sizes[wrong[0]]} bytes is listed with {found[wrong[0]]}"

    def teardown(self) -> None:
        self.tier.delete(self._keys)

    def _outcomes(self, keys: Sequence[PackedKey]) -> list[Outcome]:
        return [FOUND if key in self._model else MISSING for key in keys]

    def _expected(self, key: PackedKey, nbytes: int) -> int | Outcome:
        if key not in self._model:
            return MISSING
        return DAMAGED if len(self._model[key]) > nbytes else len(self._model[key])
