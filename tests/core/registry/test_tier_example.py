"""The tier of the hook's documentation passes the conformance kit: an example that does not would teach mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvf_dev.testing import TierConformance
from kvframework.api import hookspecs
from tests.core.registry.fake_distributions import install
from tests.core.registry.test_hook_examples import example


class TestDocumentedTier(TierConformance):
    use = "dict"
    persistent = False

    @pytest.fixture(autouse=True)
    def installed(self, site: Path) -> None:
        entry_point, code = example(hookspecs.kvf_tiers)
        install(site, "example", {entry_point: "documented_tier"}, {"documented_tier": code})
