"""Tests of tiers whose values expire: a store or a touch extends their life."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from functools import partial

import pytest

from kvf_dev.testing.tier.kit import FOUND, MISSING, STORED, TierKit
from kvframework.api.tier import Tier

# Bytes: more than a tier that cuts values into pieces keeps in one.
_LARGE = 3 << 20


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

    def must_outlive(
        self, tier: Tier, values: Mapping[bytes, bytes], begin: Callable[[], None], prolong: Callable[[], object]
    ) -> None:
        """Store `values` and one more by `begin`, call `prolong` until that one has expired, and fail unless they are
        there. Where the machine was too busy to call it within half of a value's life, all begins again."""
        give_up = self.soon()
        while True:
            (left,) = self.fresh_keys(1)
            begin()
            self.store(tier, left, b"left")
            times = [time.monotonic()]
            self.until_it_expires(tier, left, partial(_timed, prolong, times))
            times.append(time.monotonic())
            answers = {key: self.load(tier, key, len(value))[0] for key, value in values.items()}
            lost = [at for at, (key, value) in enumerate(values.items()) if answers[key] != len(value)]
            if not lost:
                return
            longest = max(after - before for before, after in itertools.pairwise(times))
            if longest < (times[-1] - times[0]) / 2:
                sizes = [len(value) for value in values.values()]
                pytest.fail(
                    f"value {lost[0] + 1} of {len(sizes)}, of {sizes[lost[0]]} bytes, is MISSING: its life was not"
                    " prolonged"
                )
            if time.monotonic() >= give_up:
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
        self.must_answer(expiring, key, 5, MISSING)
        assert expiring.delete([key], deadline=self.soon()) == [MISSING]
        self.store(expiring, key, b"again")
        self.must_load(expiring, key, b"again")

    def test_a_touched_value_lives_longer(self, expiring: Tier) -> None:
        """Each of a batch, whatever its size and its place."""
        if "touch" not in expiring.capabilities():
            pytest.skip("the tier has no touch")
        touched, missing = self.fresh_keys(4), self.fresh_keys(1)
        values = dict(zip(touched, (b"first", os.urandom(_LARGE), b"", b"last"), strict=True))
        batch = [*touched[:2], *missing, *touched[2:]]

        def store() -> None:
            outcomes = expiring.put(touched, self.parts_of(list(values.values())), deadline=self.soon())
            assert outcomes == [STORED] * 4

        self.must_outlive(expiring, values, store, lambda: expiring.touch(batch, deadline=self.soon()))
        for key in touched:
            self.until_it_expires(expiring, key, lambda: None)

    def test_a_value_that_is_stored_again_lives_longer(self, expiring: Tier) -> None:
        (stored,) = self.fresh_keys(1)

        def store() -> None:
            self.store(expiring, stored, b"again!")

        self.must_outlive(expiring, {stored: b"again!"}, store, store)
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


def _timed(call: Callable[[], object], times: list[float]) -> None:
    call()
    times.append(time.monotonic())
