"""Tests of what a tier says of itself: its name, and which optional methods it has."""

from __future__ import annotations

from kvframework.api import Tier
from kvframework.api.tier import OPTIONAL_METHODS
from kvframework.testing.tier.kit import TierKit


class ClaimTests(TierKit):
    """Each optional method that a tier has is tested with what it promises, in the tests of its own name."""

    def test_it_has_a_name(self, tier: Tier) -> None:
        assert isinstance(tier.name, str)
        assert tier.name

    def test_its_capabilities_are_optional_methods(self, tier: Tier) -> None:
        unknown = sorted(tier.capabilities() - set(OPTIONAL_METHODS))
        assert not unknown, f"unknown: {', '.join(unknown)}; there are {', '.join(OPTIONAL_METHODS)}"
