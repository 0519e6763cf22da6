"""Tests of a tier's own claims: its name, and its optional methods."""

from __future__ import annotations

from kvframework.api.tier import OPTIONAL_METHODS, Tier
from kvframework.testing.tier.kit import TierKit


class ClaimTests(TierKit):
    """An optional method is tested for its promises in the module of its own name."""

    def test_it_has_a_name(self, watched: Tier) -> None:
        assert isinstance(watched.name, str)
        assert watched.name

    def test_its_capabilities_are_optional_methods(self, watched: Tier) -> None:
        unknown = sorted(watched.capabilities() - set(OPTIONAL_METHODS))
        assert not unknown, f"unknown: {', '.join(unknown)}; there are {', '.join(OPTIONAL_METHODS)}"
