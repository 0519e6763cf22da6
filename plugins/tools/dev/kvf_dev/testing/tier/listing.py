"""Tests of tiers that have `scan`: it lists the stored values, their sizes, and when each was last used."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping

import pytest

from kvf_dev.testing.tier.kit import DELETED, STORED, TierKit
from kvf_dev.testing.tier.watched import due, said
from kvframework.api.tier import PackedKey, Tier, TierEntry
from kvframework.errors import TierError

# More than any page or cursor of a store holds.
MANY = 2500

# Seconds by which the store's clock may differ.
_CLOCK_S = 2.0


def used(entry: TierEntry, since: float = 0.0) -> float:
    """Return `used_at`; fails if that is no time between `since` and now, in Unix seconds."""
    assert entry.used_at is not None, "when a value was used is known of some values only"
    now = time.time()
    assert since - _CLOCK_S <= entry.used_at <= now + _CLOCK_S, (
        f"used_at is {entry.used_at!r}: it is the Unix time in seconds of the last store or touch, now {now:.0f}"
    )
    return entry.used_at


class ListingTests(TierKit):
    """Tests for tiers that have `scan`. The store may hold other values than those of the tests."""

    @pytest.fixture
    def listed(self, watched: Tier) -> Tier:
        if "scan" not in watched.capabilities():
            pytest.skip("the tier has no scan")
        return watched

    def scan(self, tier: Tier, keys: Collection[PackedKey]) -> dict[PackedKey, TierEntry]:
        """Return the entries of these keys; fails if one of them is listed twice."""
        found: dict[PackedKey, TierEntry] = {}
        for entry in tier.scan(deadline=self.soon()):
            if entry.key in keys:
                assert entry.key not in found, "a value is listed twice"
                found[entry.key] = entry
        return found

    def must_list(self, tier: Tier, sizes: Mapping[PackedKey, int], also: Collection[PackedKey] = ()) -> None:
        """Fail unless these values, and none under the keys of `also` besides, are listed with these sizes."""
        found = self.scan(tier, {*sizes, *also})
        assert not found.keys() - sizes.keys(), "a value that was deleted is listed"
        missing = len(sizes.keys() - found.keys())
        assert not missing, f"{missing} of {len(sizes)} values are not listed"
        other = {(sizes[key], entry.nbytes) for key, entry in found.items() if entry.nbytes != sizes[key]}
        assert not other, f"a value of {min(other)[0]} bytes is listed with {min(other)[1]}"

    def skip_without_times(self, tier: Tier, found: Mapping[PackedKey, TierEntry]) -> None:
        """Skip the rest of a test for a tier that does not say when values were used, which it may if nothing is
        evicted by it."""
        if all(entry.used_at is None for entry in found.values()):
            assert "usage" not in tier.capabilities(), "a tier that knows its capacity says when values were used"
            pytest.skip("the tier does not know when a value was used")

    def test_it_lists_what_is_there_with_its_size(self, listed: Tier) -> None:
        keys = self.fresh_keys(40)
        sizes = {key: (index * 997) % 5000 for index, key in enumerate(keys)}
        values = [bytes(sizes[key]) for key in keys]
        assert listed.put(keys, self.parts_of(values), deadline=self.soon()) == [STORED] * len(keys)
        self.must_list(listed, sizes)
        assert listed.delete(keys[:10], deadline=self.soon()) == [DELETED] * 10
        kept = {key: sizes[key] for key in keys[10:]}
        self.must_list(listed, kept, also=keys)
        self.store(listed, keys[-1], b"longer than it was" * 500)
        self.must_list(listed, kept | {keys[-1]: 9000})
        listed.delete(keys, deadline=self.soon())
        self.must_list(listed, {}, also=keys)

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
        touched, also, stored, left = keys = self.fresh_keys(4)
        began = time.time()
        for key in keys:
            self.store(listed, key, b"value")
        first = self.scan(listed, keys)
        self.skip_without_times(listed, first)
        began -= self.time_step_s
        before = {key: used(entry, began) for key, entry in first.items()}
        time.sleep(2 * self.time_step_s)
        touched_at = time.time() - self.time_step_s
        listed.touch([touched, also], deadline=self.soon())
        self.store(listed, stored, b"value")
        then = self.scan(listed, keys)
        moved = abs(used(then[left]) - before[left])
        assert moved <= self.time_step_s, "the time of use of a value changed without a use"
        for key in (touched, also) if "touch" in listed.capabilities() else ():
            assert used(then[key], touched_at) > used(then[left]), "touching a value did not change when it was used"
        assert used(then[stored], touched_at) > used(then[left]), "storing a value did not change when it was used"

    def test_a_scan_that_rests_holds_nothing(self, listed: Tier) -> None:
        """The caller deletes what it was given, takes its time between two values, and may never go on."""
        keys = self.fresh_keys(6)
        for key in keys:
            self.store(listed, key, b"value")
        resting = [listed.scan(deadline=self.soon()) for _ in range(3)]
        for entries in resting:
            next(entries)

        def work(tier: Tier) -> None:
            (key,) = self.fresh_keys(1)
            self.store(tier, key, b"stored while a scan rests")
            self.must_load(tier, key, b"stored while a scan rests")
            deleted = tier.delete([key, keys[0]], deadline=self.soon())[0]
            assert deleted is DELETED, f"delete answered {said(deleted)} while a scan rests; {due(DELETED)}"
            self.store(tier, keys[0], b"again")
            self.scan(tier, keys)

        others = [self.another(listed)] if self.is_shared and self.can_reopen else []
        for tier in (listed, *others):
            self.in_threads(lambda tier=tier: work(tier), within_s=self.patience_s + self.grace_s)  # type: ignore[misc]
            work(tier)
        self.in_threads(listed.close, within_s=self.patience_s)
        with contextlib.suppress(TierError):
            next(resting[0])
        resting.clear()

    def test_it_goes_on_while_values_come_and_go(self, listed: Tier) -> None:
        """What stays is listed once, whatever leaves and comes before and behind the place where the scan is."""
        stay, go, come = (self.fresh_keys(MANY // 4) for _ in range(3))
        mixed = [key for pair in zip(stay, go, strict=True) for key in pair]
        assert listed.put(mixed, self.parts_of([b"value"] * len(mixed)), deadline=self.soon()) == [STORED] * len(mixed)
        staying, leaving, seen = set(stay), set(go), list[PackedKey]()
        coming = list(come)
        for entry in listed.scan(deadline=self.soon()):
            seen.append(entry.key)
            if entry.key in leaving:  # as the server does, which makes room
                leaving.discard(entry.key)
                listed.delete([entry.key], deadline=self.soon())
            elif len(seen) % 4 == 0 and leaving:
                listed.delete([leaving.pop()], deadline=self.soon())
            elif coming:
                self.store(listed, coming.pop(), b"value")
        assert len(seen) == len(set(seen)), "a value is listed twice"
        missing = len(staying - set(seen))
        assert not missing, f"{missing} of {len(stay)} values that stayed are not listed"
        assert listed.delete(stay, deadline=self.soon()) == [DELETED] * len(stay)

    def test_what_outlives_the_tier_is_listed_again(self, listed: Tier) -> None:
        if not (self.persistent and self.can_reopen):
            pytest.skip("values end with the tier, or there is no `reopen`")
        keys = self.fresh_keys(12)
        sizes = {key: 1 + index * 997 for index, key in enumerate(keys)}
        values = [bytes(size) for size in sizes.values()]
        assert listed.put(keys, self.parts_of(values), deadline=self.soon()) == [STORED] * len(keys)
        before = self.scan(listed, keys)
        time.sleep(3 * self.time_step_s)  # so that the time of opening is another one
        listed.close()
        again = self.another(listed)
        self.must_list(again, sizes)
        for key, entry in self.scan(again, keys).items():
            if before[key].used_at is not None:
                moved = abs(used(entry) - used(before[key]))
                assert moved <= self.time_step_s, f"opening the store moved a time of use by {moved:.1f} s"
        again.delete(keys, deadline=self.soon())

    def test_a_late_scan_is_refused(self, listed: Tier) -> None:
        for key in self.fresh_keys(3):
            self.store(listed, key, b"value")
        self.must_raise("scan", lambda: list(listed.scan(deadline=time.monotonic() - 1.0)), "the deadline has passed")
