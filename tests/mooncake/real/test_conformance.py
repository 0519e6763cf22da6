"""The Mooncake tier keeps the contract of tiers on a real Mooncake Store."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvf_dev.testing import TierConformance
from tests.mooncake.real.store import MooncakeStore


class TestMooncake(TierConformance):
    use = "mooncake"

    @pytest.fixture
    def tier_options(self, shared: MooncakeStore) -> Mapping[str, object]:
        return {"master": shared.address}
