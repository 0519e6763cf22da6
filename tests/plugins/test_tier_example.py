"""The tier of the hook's documentation passes the conformance kit: an example that does not would teach mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework.api import NoOptions, Tier, TierContext, TierProvider, hookspecs
from kvframework.plugins import PluginRegistry
from kvframework.testing.tier import TierConformance
from tests.plugins.fake_distributions import install
from tests.plugins.test_hook_examples import example


class TestDocumentedTier(TierConformance):
    @pytest.fixture
    def tier(self, site: Path) -> Iterator[Tier]:
        _, code = example(hookspecs.kvf_tiers)
        install(site, "example", {"tier.dict": "documented_tier"}, {"documented_tier": code})
        provider = PluginRegistry().resolve("tier", "dict")
        assert isinstance(provider, TierProvider)
        tier = provider.create(NoOptions(), TierContext("here"))
        yield tier
        tier.close()
