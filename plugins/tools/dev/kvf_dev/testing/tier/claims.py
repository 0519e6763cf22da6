"""Tests of a tier's own claims: its name, and its optional methods."""

from __future__ import annotations

import pytest

from kvf_dev.testing.tier.kit import TierKit
from kvframework.api.tier import OPTIONAL_METHODS, Tier
from kvframework.errors import TierError


class ClaimTests(TierKit):
    """An optional method is tested for its promises in the module of its own name."""

    def test_it_has_a_name(self, watched: Tier) -> None:
        assert isinstance(watched.name, str), f"`name` is {watched.name!r}, no str"
        assert watched.name, "`name` is empty"
        assert not self.use or watched.name == self.use, f"the plugin is {self.use!r}, and the tier {watched.name!r}"

    def test_its_capabilities_are_optional_methods(self, watched: Tier) -> None:
        answer = watched.capabilities()
        assert isinstance(answer, frozenset), f"capabilities answered a {type(answer).__name__}, no frozenset"
        unknown = sorted(answer - set(OPTIONAL_METHODS))
        assert not unknown, f"unknown: {', '.join(unknown)}; there are {', '.join(OPTIONAL_METHODS)}"

    def test_what_it_claims_to_have_it_has(self, watched: Tier) -> None:
        """A method of the base class, which is not overridden, keeps no promise."""
        calls = self.every_call(watched, self.fresh_keys(1)[0], self.soon)
        for name in sorted(watched.capabilities() & set(OPTIONAL_METHODS)):
            try:
                calls[name]()
            except TierError as error:
                pytest.fail(f"{name} is claimed, and raised: {error.fact}")
