"""The kit over the correct tier: by its name and from a fixture. Run by pytest outside of the repository."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from memory_tier import MemoryTier, Store

from kvf_dev.testing import TierConformance
from kvf_dev.testing.tier.contract import ClaimTests
from kvframework.api.tier import PackedKey, Tier


class TestByName(TierConformance):
    use = "memory"
    options: ClassVar = {"store": "by name"}
    ttl_options: ClassVar = {"store": "expiring", "ttl_s": 0.1}
    capacity_options: ClassVar = {"store": "small", "capacity": "1MiB"}
    time_step_s = 0.01

    def damage(self, tier: Tier, key: PackedKey) -> None:
        tier.damage(key)  # type: ignore[attr-defined]


class TestAlone(TierConformance):
    use = "alone"
    options: ClassVar = {"store": "alone"}
    capacity_options: ClassVar = {"capacity": "1MiB"}
    time_step_s = 0.01


class TestFromAFixture(TierConformance):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = OnlyWhatMustBe(Store())
        yield tier
        tier.close()


class OnlyWhatMustBe(MemoryTier):
    usage = Tier.usage
    scan = Tier.scan


class TestNothingGiven(ClaimTests):
    pass


class TestWrongOptions(ClaimTests):
    use = "memory"
    options: ClassVar = {"stroe": "by name"}


class TestWrongName(ClaimTests):
    use = "memroy"


class TestElsewhere(TierConformance):
    use = "elsewhere"
    options: ClassVar = {"store": "none"}
