"""Tests of tiers that have `scan`: it lists the stored values, their sizes, and when each was last used."""

from __future__ import annotations

import time
from collections.abc import Collection

import pytest

from kvframework.api.tier import PackedKey, Tier, TierEntry
from kvframework.errors import TierError
from kvframework.testing.tier.kit import DELETED, STORED, TierKit

# More than any page or cursor of a store holds.
MANY = 2500


class ListingTests(TierKit):
    """Tests for tiers that have `scan`. The store may hold other values than those of the tests."""

    @pytest.fixture
    def listed(self, tier: Tier) -> Tier:
        if "scan" not in tier.capabilities():
            pytest.skip("the tier has no scan")
        return tier

    def scan(self, tier: Tier, keys: Collection[PackedKey]) -> dict[PackedKey, TierEntry]:
        """Return the entries of these keys; fails if one of them is listed twice."""
        found: dict[PackedKey, TierEntry] = {}
        for entry in tier.scan(deadline=self.soon()):
            assert isinstance(entry, TierEntry)
            assert isinstance(entry.key, bytes)
            if entry.key in keys:
                assert entry.key not in found, "a value is listed twice"
                found[entry.key] = entry
        return found

    def test_it_lists_what_is_there_with_its_size(self, listed: Tier) -> None:
        keys = self.fresh_keys(40)
        sizes = {key: (index * 997) % 5000 for index, key in enumerate(keys)}
        values = [bytes(sizes[key]) for key in keys]
        assert listed.put(keys, self.parts_of(values), deadline=self.soon()) == [STORED] * len(keys)
        assert {key: entry.nbytes for key, entry in self.scan(listed, keys).items()} == sizes
        assert listed.delete(keys[:10], deadline=self.soon()) == [DELETED] * 10
        assert set(self.scan(listed, keys)) == set(keys[10:])
        self.store(listed, keys[-1], b"longer than it was" * 500)
        assert self.scan(listed, keys)[keys[-1]].nbytes == 9000
        listed.delete(keys, deadline=self.soon())
        assert self.scan(listed, keys) == {}

    def test_it_lists_more_than_one_page(self, listed: Tier) -> None:
        keys = self.fresh_keys(MANY)
        for first in range(0, MANY, 250):
            batch = keys[first : first + 250]
            assert listed.put(batch, self.parts_of([b"value"] * 250), deadline=self.soon()) == [STORED] * 250
        there = self.scan(listed, set(keys))
        assert len(there) == MANY, f"{len(there)} of {MANY} values are listed"
        for first in range(0, MANY, 250):
            listed.delete(keys[first : first + 250], deadline=self.soon())

    def test_it_tells_when_a_value_was_used(self, listed: Tier) -> None:
        touched, stored, left = keys = self.fresh_keys(3)
        began = time.time()
        for key in keys:
            self.store(listed, key, b"value")
        first = self.scan(listed, keys)
        slack = self.time_step_s + 2.0  # of the store's clock
        assert all(began - slack <= entry.used_at <= time.time() + slack for entry in first.values())
        time.sleep(2 * self.time_step_s)
        listed.touch([touched], deadline=self.soon())
        self.store(listed, stored, b"value")
        then = self.scan(listed, keys)
        assert then[left].used_at == pytest.approx(first[left].used_at, abs=self.time_step_s)
        assert then[touched].used_at > then[left].used_at, "touching a value did not change when it was used"
        assert then[stored].used_at > then[left].used_at, "storing a value did not change when it was used"

    def test_it_may_be_left_off(self, listed: Tier) -> None:
        for key in self.fresh_keys(5):
            self.store(listed, key, b"value")
        for _ in range(3):
            entries = listed.scan(deadline=self.soon())
            next(entries)
            del entries
        self.store(listed, self.fresh_keys(1)[0], b"it goes on")

    def test_it_goes_on_while_values_come_and_go(self, listed: Tier) -> None:
        stay, go, come = (self.fresh_keys(20) for _ in range(3))
        for key in stay + go:
            self.store(listed, key, b"value")
        seen = []
        for entry in listed.scan(deadline=self.soon()):
            seen.append(entry.key)
            if len(seen) % 2 and go:
                listed.delete([go.pop()], deadline=self.soon())
            elif come:
                self.store(listed, come.pop(), b"value")
        assert set(stay) <= set(seen)
        assert len(seen) == len(set(seen)), "a value is listed twice"

    def test_a_late_scan_is_refused(self, listed: Tier) -> None:
        for key in self.fresh_keys(3):
            self.store(listed, key, b"value")
        with pytest.raises(TierError):
            list(listed.scan(deadline=time.monotonic() - 1.0))
