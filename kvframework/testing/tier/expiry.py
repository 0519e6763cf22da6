"""Tests of the capability `ttl`: values expire, and a store or a touch extends their life."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvframework.api import Tier
from kvframework.testing.tier.kit import DELETED, FOUND, MISSING, TierKit


class ExpiryTests(TierKit):
    """Tests for tiers that declare `ttl`. The kit does not know the time to live: it keeps one value alive until
    another expires.
    """

    @pytest.fixture
    def expiring(self, declared: frozenset[str], request: pytest.FixtureRequest) -> Tier:
        """A tier whose values expire within `patience_s`."""
        if "ttl" not in declared:
            pytest.skip("the tier does not declare ttl")
        tier: Tier = request.getfixturevalue("ttl_tier")
        return tier

    def until_it_expires(self, tier: Tier, key: bytes, meanwhile: Callable[[], None]) -> None:
        deadline = self.soon()
        while tier.contains([key], deadline=self.soon()) == [FOUND]:
            assert time.monotonic() < deadline, f"the value did not expire within {self.patience_s} s"
            meanwhile()
            time.sleep(0.02)

    def test_a_value_expires(self, expiring: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(expiring, key, b"value")
        self.must_load(expiring, key, b"value")
        self.until_it_expires(expiring, key, lambda: None)
        assert self.load(expiring, key, 5)[0] is MISSING
        assert expiring.delete([key], deadline=self.soon()) == [MISSING]
        self.store(expiring, key, b"again")
        self.must_load(expiring, key, b"again")

    def test_a_touched_value_lives_longer(self, expiring: Tier) -> None:
        touched, left = self.fresh_keys(2)
        self.store(expiring, touched, b"touched")
        self.store(expiring, left, b"left")
        self.until_it_expires(expiring, left, lambda: expiring.touch([touched], deadline=self.soon()))
        self.must_load(expiring, touched, b"touched")
        self.until_it_expires(expiring, touched, lambda: None)

    def test_a_value_that_is_stored_again_lives_longer(self, expiring: Tier) -> None:
        stored, left = self.fresh_keys(2)
        self.store(expiring, stored, b"stored")
        self.store(expiring, left, b"left")
        self.until_it_expires(expiring, left, lambda: self.store(expiring, stored, b"again!"))
        self.must_load(expiring, stored, b"again!")
        assert expiring.delete([stored], deadline=self.soon()) == [DELETED]
