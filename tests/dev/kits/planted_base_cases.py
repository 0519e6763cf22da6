"""What the planted bugs have in common: the kit over two tiers of one class, with little patience."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import pytest
from memory_tier import MemoryTier, Store, Value

from kvf_dev.testing import TierConformance
from kvframework.api.tier import Outcome, PackedKey, Tier
from kvframework.errors import TierError


class Planted(TierConformance):
    """Two tiers of the class `Bug` share a store; nothing waits for long."""

    Bug: type[MemoryTier]
    patience_s = 1.0
    grace_s = 0.3
    time_step_s = 0.01
    capacity = 1 << 30

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = self.Bug(Store(), capacity=self.capacity)
        yield tier
        with contextlib.suppress(TierError):
            tier.close()

    @pytest.fixture
    def ttl_tier(self) -> Tier:
        return self.Bug(Store(), ttl_s=0.05)

    @pytest.fixture
    def small_tier(self) -> Tier:
        return self.Bug(Store(), capacity=1 << 20)

    def reopen(self, tier: Tier) -> Tier:
        assert isinstance(tier, MemoryTier)
        return self.Bug(tier.store)


class InPlace(MemoryTier):
    """Writes a value over the old one, one half after the other."""

    def put_one(self, key: PackedKey, parts: Sequence[memoryview]) -> Outcome:
        new, old = b"".join(parts), self.value(key)
        if old is not None and len(old) == len(new):
            half = len(new) // 2
            self.store.values[key] = Value(new[:half] + old[half:], 0.0)
            time.sleep(0.001)
            old = self.value(key) or new
            self.store.values[key] = Value(old[:half] + new[half:], 0.0)
            return Outcome.STORED
        return super().put_one(key, parts)
