"""Tests of tiers whose values expire: a store or a touch extends their life."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvframework.api.tier import Tier
from kvframework.testing.tier.kit import DELETED, FOUND, MISSING, TierKit


class ExpiryTests(TierKit):
    """Tests for a `ttl_tier`. The kit does not know the time to live: it keeps one value alive until another
    expires."""

    def until_it_expires(self, tier: Tier, key: bytes, meanwhile: Callable[[], None]) -> None:
        deadline = self.soon()
        while tier.contains([key], deadline=self.soon()) == [FOUND]:
            assert time.monotonic() < deadline, f"the value did not expire within {self.patience_s} s"
            meanwhile()
            time.sleep(0.02)

    def test_a_value_expires(self, ttl_tier: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(ttl_tier, key, b"value")
        self.must_load(ttl_tier, key, b"value")
        self.until_it_expires(ttl_tier, key, lambda: None)
        assert self.load(ttl_tier, key, 5)[0] is MISSING
        assert ttl_tier.delete([key], deadline=self.soon()) == [MISSING]
        self.store(ttl_tier, key, b"again")
        self.must_load(ttl_tier, key, b"again")

    def test_a_touched_value_lives_longer(self, ttl_tier: Tier) -> None:
        if "touch" not in ttl_tier.capabilities():
            pytest.skip("the tier has no touch")
        touched, left = self.fresh_keys(2)
        self.store(ttl_tier, touched, b"touched")
        self.store(ttl_tier, left, b"left")
        self.until_it_expires(ttl_tier, left, lambda: ttl_tier.touch([touched], deadline=self.soon()))
        self.must_load(ttl_tier, touched, b"touched")
        self.until_it_expires(ttl_tier, touched, lambda: None)

    def test_a_value_that_is_stored_again_lives_longer(self, ttl_tier: Tier) -> None:
        stored, left = self.fresh_keys(2)
        self.store(ttl_tier, stored, b"stored")
        self.store(ttl_tier, left, b"left")
        self.until_it_expires(ttl_tier, left, lambda: self.store(ttl_tier, stored, b"again!"))
        self.must_load(ttl_tier, stored, b"again!")
        assert ttl_tier.delete([stored], deadline=self.soon()) == [DELETED]
