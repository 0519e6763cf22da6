"""The LRU policy against a small model."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvf_eviction import Lru, kvf_eviction_policies
from kvframework.api import NoOptions

KEYS = st.sampled_from([bytes([number]) * 72 for number in range(6)])


class LruModel(RuleBasedStateMachine):
    """The model remembers when each key was last used."""

    def __init__(self) -> None:
        super().__init__()
        (provider,) = kvf_eviction_policies()
        self.policy = provider.create(NoOptions())
        self.last_use: dict[bytes, int] = {}
        self.now = 0

    def _use(self, key: bytes) -> None:
        self.now += 1
        self.last_use[key] = self.now

    @rule(key=KEYS)
    def insert_or_access(self, key: bytes) -> None:
        if key in self.last_use:
            self.policy.on_access(key)
        else:
            self.policy.on_insert(key, 100)
        self._use(key)

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        if self.last_use.pop(key, None) is not None:
            self.policy.on_remove(key)

    @rule(count=st.integers(0, 3))
    def evict(self, count: int) -> None:
        victims = self.policy.victims()
        chosen = [key for key, _ in zip(victims, range(count), strict=False)]
        for key in chosen:
            self.policy.on_remove(key)
            del self.last_use[key]

    @invariant()
    def victims_are_all_keys_oldest_use_first(self) -> None:
        assert list(self.policy.victims()) == sorted(self.last_use, key=lambda key: self.last_use[key])


TestLru = LruModel.TestCase


def test_its_name_is_the_entry_points() -> None:
    assert Lru.name == "lru"
