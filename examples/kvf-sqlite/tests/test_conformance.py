"""The tier fulfils the contract of tiers, and that of its optional methods."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvf_dev.testing import TierConformance


class TestSqlite(TierConformance):
    use = "sqlite"
    capacity_options = {"capacity": "1MiB"}  # noqa: RUF012

    @pytest.fixture
    def tier_options(self, tmp_path: Path) -> Mapping[str, object]:
        return {"path": str(tmp_path / "l2.db"), "capacity": "1GiB"}
