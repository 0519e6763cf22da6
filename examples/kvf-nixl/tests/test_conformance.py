"""The tier fulfils the contract of tiers, on the real NIXL."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from kvf_nixl.build import installed_build

from kvf_dev.testing import TierConformance

pytestmark = pytest.mark.skipif(not installed_build(), reason="NIXL is not installed: pip install nixl")


class TestNixl(TierConformance):
    use = "nixl"

    @pytest.fixture
    def tier_options(self, tmp_path: Path) -> Mapping[str, object]:
        return {"path": str(tmp_path / "values")}
