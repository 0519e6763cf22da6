"""Comparison of a tier with a dict: hypothesis generates sequences of batches, and shrinks one that differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kvf_dev.testing.tier.kit import DAMAGED, DELETED, FOUND, MISSING, STORED, TierKit
from kvframework.api.tier import Outcome, PackedKey, Tier

STEPS = 15

# Few keys, so that batches share them; a few lengths, so that buffers are too small, too large and exact.
KEYS = st.integers(0, 5)
LENGTHS = st.sampled_from([0, 1, 2, 3, 17, 4096, 70_000])
KEY_BATCHES = st.lists(KEYS, max_size=8)
SIZED_BATCHES = st.lists(st.tuples(KEYS, LENGTHS), max_size=8)


class ModelTests(TierKit):
    def test_it_behaves_like_a_dict(self, watched: Tier) -> None:
        class Machine(TierMachine):
            kit, tier_under_test = self, watched

        # Some releases of hypothesis have no types for it.
        run_state_machine_as_test(  # type: ignore[no-untyped-call, unused-ignore]
            Machine,
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=STEPS,
                deadline=None,
                phases=(Phase.reuse, Phase.generate, Phase.shrink),
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )


class TierMachine(RuleBasedStateMachine):
    """One sequence of batches, on its own keys."""

    kit: ClassVar[TierKit]
    tier_under_test: ClassVar[Tier]

    def __init__(self) -> None:
        super().__init__()
        self._kit = self.kit
        self._tier = self.tier_under_test
        self._keys = self._kit.fresh_keys(6)
        self._model: dict[PackedKey, bytes] = {}
        self._stored = 0

    @rule(batch=SIZED_BATCHES)
    def put(self, batch: list[tuple[int, int]]) -> None:
        keys, values = [], []
        for index, nbytes in batch:
            self._stored += 1
            keys.append(self._keys[index])
            values.append((b"%d." % self._stored * nbytes)[:nbytes])
        assert self._tier.put(keys, self._kit.parts_of(values), deadline=self._kit.soon()) == [STORED] * len(batch)
        self._model.update(zip(keys, values, strict=True))

    @rule(batch=SIZED_BATCHES)
    def get(self, batch: list[tuple[int, int]]) -> None:
        keys, buffers = [self._keys[index] for index, _ in batch], [bytearray(nbytes) for _, nbytes in batch]
        outcomes = self._tier.get_into(keys, self._kit.parts_of(buffers), deadline=self._kit.soon())
        assert outcomes == [self._expected(key, len(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
        for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
            if not isinstance(outcome, Outcome):
                value = self._model[key]
                self._kit.must_be([buffer[: len(value)]], [value])

    @rule(batch=KEY_BATCHES)
    def delete(self, batch: list[int]) -> None:
        keys = [self._keys[index] for index in batch]
        expected = [MISSING if self._model.pop(key, None) is None else DELETED for key in keys]
        assert self._tier.delete(keys, deadline=self._kit.soon()) == expected

    @rule(batch=KEY_BATCHES)
    def contains(self, batch: list[int]) -> None:
        keys = [self._keys[index] for index in batch]
        assert self._tier.contains(keys, deadline=self._kit.soon()) == self._known(keys)

    @rule(batch=KEY_BATCHES)
    def touch(self, batch: list[int]) -> None:
        self._tier.touch([self._keys[index] for index in batch], deadline=self._kit.soon())
        assert self._tier.contains(self._keys, deadline=self._kit.soon()) == self._known(self._keys)

    def teardown(self) -> None:
        self._tier.delete(self._keys, deadline=self._kit.soon())

    def _known(self, keys: Sequence[PackedKey]) -> list[Outcome]:
        return [FOUND if key in self._model else MISSING for key in keys]

    def _expected(self, key: PackedKey, nbytes: int) -> int | Outcome:
        if key not in self._model:
            return MISSING
        return DAMAGED if len(self._model[key]) > nbytes else len(self._model[key])
