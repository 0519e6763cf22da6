"""Tests of tiers whose values expire: a store or a touch extends their life."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from kvframework.api.tier import Tier
from kvframework.testing.tier.kit import FOUND, MISSING, STORED, TierKit

# Bytes: more than a tier that cuts values into pieces keeps in one.
_LARGE = 3 << 20
_ATTEMPTS = 5


class ExpiryTests(TierKit):
    """Tests for a `ttl_tier`. The kit does not know the time to live: it keeps one value alive until another
    expires."""

    @pytest.fixture
    def expiring(self, ttl_tier: Tier) -> Tier:
        return self.watch(ttl_tier)

    def until_it_expires(self, tier: Tier, key: bytes, meanwhile: Callable[[], None]) -> None:
        deadline = self.soon()
        while tier.contains([key], deadline=self.soon()) == [FOUND]:
            assert time.monotonic() < deadline, f"the value did not expire within {self.patience_s} s"
            meanwhile()
            time.sleep(0.02)

    def outlive(self, tier: Tier, left: bytes, begin: Callable[[], None], prolong: Callable[[], object]) -> None:
        """Call `prolong` again and again after `begin`, until the value under `left` has expired. Where the machine was
        too busy to call it in half of a value's life, all begins again."""
        for _ in range(_ATTEMPTS):
            begin()
            began = last = time.monotonic()
            gaps = [0.0]

            def prolonged() -> None:
                nonlocal last
                prolong()
                now = time.monotonic()
                gaps.append(now - last)
                last = now

            self.until_it_expires(tier, left, prolonged)
            if max(*gaps, time.monotonic() - last) < (time.monotonic() - began) / 2:
                return
        pytest.skip("the machine is too busy for values that expire so soon")

    def until(self, true: Callable[[], bool], otherwise: str) -> None:
        deadline = self.soon()
        while not true():
            assert time.monotonic() < deadline, otherwise
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
        """Each of a batch, whatever its size and its place."""
        if "touch" not in expiring.capabilities():
            pytest.skip("the tier has no touch")
        *touched, left = self.fresh_keys(5)
        values = [b"first", os.urandom(_LARGE), b"", b"last"]
        missing = self.fresh_keys(1)
        batch = [*touched[:2], *missing, *touched[2:]]

        def store() -> None:
            assert expiring.put(touched, self.parts_of(values), deadline=self.soon()) == [STORED] * 4
            self.store(expiring, left, b"left")

        self.outlive(expiring, left, store, lambda: expiring.touch(batch, deadline=self.soon()))
        for at, (key, value) in enumerate(zip(touched, values, strict=True)):
            what = f"value {at + 1} of {len(touched)}, of {len(value)} bytes"
            self.must_load(expiring, key, value, f"a touch of a batch did not prolong the life of {what}")
        for key in touched:
            self.until_it_expires(expiring, key, lambda: None)

    def test_a_value_that_is_stored_again_lives_longer(self, expiring: Tier) -> None:
        stored, left = self.fresh_keys(2)

        def store() -> None:
            self.store(expiring, stored, b"stored")
            self.store(expiring, left, b"left")

        self.outlive(expiring, left, store, lambda: self.store(expiring, stored, b"again!"))
        self.must_load(expiring, stored, b"again!", "storing a value again did not prolong its life")
        self.until_it_expires(expiring, stored, lambda: None)

    def test_what_expired_is_gone_for_every_call(self, expiring: Tier) -> None:
        (key,) = self.fresh_keys(1)
        known = expiring.capabilities()
        before = expiring.usage(deadline=self.soon()).used_bytes if "usage" in known else 0
        self.store(expiring, key, b"value")
        self.until_it_expires(expiring, key, lambda: None)
        expiring.touch([key], deadline=self.soon())
        assert expiring.contains([key], deadline=self.soon()) == [MISSING], "a touch revived what had expired"
        if "scan" in known:
            listed = {entry.key for entry in expiring.scan(deadline=self.soon())}
            assert key not in listed, "what has expired is listed"
        if "usage" in known:
            self.until(lambda: expiring.usage(deadline=self.soon()).used_bytes <= before, "what has expired is counted")

    def test_several_values_expire_each_by_itself(self, expiring: Tier) -> None:
        keys = self.fresh_keys(5)
        assert expiring.put(keys, self.parts_of([b"value"] * 5), deadline=self.soon()) == [STORED] * 5
        for key in keys:
            self.until_it_expires(expiring, key, lambda: None)
        assert expiring.contains(keys, deadline=self.soon()) == [MISSING] * 5
