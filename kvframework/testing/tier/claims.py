"""Tests of a tier's declared capabilities: they exist, and an undeclared operation is refused."""

from __future__ import annotations

import pytest

from kvframework.api import TIER_CAPABILITIES, Tier
from kvframework.testing.tier.kit import TierKit


class ClaimTests(TierKit):
    """A declared capability is tested for its promises in the module of its own name."""

    def test_every_declared_capability_exists(self, declared: frozenset[str]) -> None:
        unknown = sorted(declared - TIER_CAPABILITIES.keys())
        assert not unknown, f"unknown: {', '.join(unknown)}; there are {', '.join(TIER_CAPABILITIES)}"

    def test_it_has_a_name(self, tier: Tier) -> None:
        assert isinstance(tier.name, str)
        assert tier.name

    def test_an_undeclared_usage_is_refused(self, tier: Tier, declared: frozenset[str]) -> None:
        if "capacity" in declared:
            pytest.skip("the tier declares capacity")
        self.must_raise("usage", lambda: tier.usage(deadline=self.soon()), "capacity is not declared")

    def test_an_undeclared_scan_is_refused(self, tier: Tier, declared: frozenset[str]) -> None:
        if "scan" in declared:
            pytest.skip("the tier declares scan")
        self.must_raise("scan", lambda: list(tier.scan(deadline=self.soon())), "scan is not declared")
