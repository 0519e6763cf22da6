"""Tests of tiers that have `usage`, whose values expire, or that have `scan`."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable

import pytest

from kvf_dev.testing.tier.concurrency import turns
from kvf_dev.testing.tier.kit import DELETED, FAILED, FOUND, MISSING, STORED, TierKit, WatchedTier, parts_of
from kvframework.api.tier import PackedKey, TierEntry
from kvframework.errors import TierError

LARGEST = 64 << 20
# Bytes: more than a tier that cuts values into pieces keeps in one.
_LARGE = 3 << 20
# More than any page or cursor of a store holds.
MANY = 1250
# Seconds by which the store's clock may differ.
_CLOCK_S = 2.0


class CapacityTests(TierKit):
    """Tests for tiers that have `usage`."""

    def test_usage_follows_what_is_stored_and_deleted(self, watched: WatchedTier) -> None:
        self.needs(watched, "usage")
        keys, nbytes = self.fresh_keys(3), 100_000
        usage = watched.usage()
        used = counted = usage.used_bytes
        assert used < usage.capacity_bytes, f"`usage` must return used_bytes, then capacity_bytes, but returned {usage}"
        for key in keys:
            watched.store(key, os.urandom(nbytes))
            before, counted = counted, watched.usage().used_bytes
            assert counted >= before + nbytes, f"`used_bytes` rose from {before} to {counted} for {nbytes} stored bytes"
        watched.store(keys[0], os.urandom(nbytes))
        assert watched.usage().used_bytes < counted + nbytes, "The tier's used_bytes count a replaced value twice"
        assert watched.delete(keys[:1]) == [DELETED]
        left = watched.usage().used_bytes
        assert left <= counted - nbytes, (
            f"`used_bytes` fell from {counted} to {left} after the tier deleted {nbytes} bytes"
        )
        assert watched.delete(keys) == [MISSING, DELETED, DELETED]
        left = watched.usage().used_bytes - used
        assert left <= 0, f"The tier's used_bytes are {left} too high after all values were deleted"

    @pytest.fixture
    def fillable(self, watched: WatchedTier, request: pytest.FixtureRequest) -> WatchedTier:
        self.needs(watched, "usage")
        watched.close()  # it may share its store with the small one, and refuse a second opener
        tier = self.watch(request.getfixturevalue("small_tier"))
        assert 0 < tier.usage().capacity_bytes <= LARGEST, "`capacity_bytes` are above 64 MiB"
        return tier

    def test_what_is_put_beyond_the_capacity_is_refused_or_makes_room(self, fillable: WatchedTier) -> None:
        capacity = fillable.usage().capacity_bytes
        nbytes = capacity // 20
        values: dict[PackedKey, bytes] = {}
        for key in self.fresh_keys(30):
            value = os.urandom(16) * (nbytes // 16)
            (outcome,) = fillable.put([key], parts_of([value]))
            assert fillable.usage().used_bytes <= capacity, "The tier's used_bytes are above its capacity_bytes"
            if outcome is STORED:
                values[key] = value
                fillable.must_load(key, value, "The tier said STORED, but the value is missing")
        assert len(values) >= 10, "The tier refused values long before it held capacity_bytes"

        last = list(values)[-1]
        values[last] = os.urandom(nbytes)
        outcomes = fillable.put([last], parts_of([values[last]]))
        assert outcomes == [STORED], "A full tier must replace a value by one of the same size"
        fillable.must_load(last, values[last])
        found = fillable.contains(list(values)).count(FOUND)
        assert found * nbytes <= capacity, "The tier holds more bytes than its capacity_bytes"

        fillable.delete(list(values))
        fillable.store(last, b"there is room again")
        fillable.must_load(last, b"there is room again")
        fillable.delete([last])

    def test_what_is_replaced_and_deleted_leaves_nothing_behind(self, fillable: WatchedTier) -> None:
        usage = fillable.usage()
        large, small = bytes(usage.capacity_bytes // 10), bytes(usage.capacity_bytes // 100)
        # Four times the capacity is written over the course of the loop.
        for turn, key in enumerate(self.fresh_keys(20)):
            for value in (large, small, large):
                stored = fillable.put([key], parts_of([value]))
                assert stored == [STORED], f"No room for a tenth of the capacity after {turn} deleted values"
            assert fillable.delete([key]) == [DELETED]
        self.must_be_empty(fillable, usage.used_bytes)

    def must_be_empty(self, tier: WatchedTier, before: int) -> None:
        left = tier.usage().used_bytes - before
        assert left == 0, f"The tier's used_bytes grew by {left} although all values were deleted"
        values = dict.fromkeys(self.fresh_keys(10), bytes(tier.usage().capacity_bytes // 20))
        stored = tier.put(list(values), parts_of(values.values()))
        assert stored == [STORED] * 10, "The tier has no room for half of its capacity after all values were deleted"
        tier.delete(list(values))

    def test_one_value_that_does_not_fit_is_refused_alone(self, fillable: WatchedTier) -> None:
        one, huge, other = keys = self.fresh_keys(3)
        values, held = [b"one", bytes(fillable.usage().capacity_bytes + 1), b"other"], None
        for turn in range(3):
            try:
                outcomes = fillable.put(keys, parts_of(values))
            except TierError as error:
                pytest.fail(f"`put` must report a value that does not fit as FAILED, but raised: {error.fact}")
            assert outcomes == [STORED, FAILED, STORED]
            assert fillable.contains([huge]) == [MISSING], "The tier holds a value that put refused"
            used = fillable.usage().used_bytes
            held = used if held is None else held
            assert used <= held, f"The tier's used_bytes count refused values, after {turn + 1} of them"
        fillable.must_load(one, b"one")
        fillable.must_load(other, b"other")
        assert fillable.put([one], parts_of(values[1:2])) == [FAILED]
        received, found = fillable.load(one, 3)
        assert received is MISSING or (received, found) == (3, b"one"), "The tier returned another value"
        fillable.delete(keys)

    def test_usage_is_right_after_concurrent_calls(self, fillable: WatchedTier) -> None:
        """A sum that threads change without a lock drifts; a check that is apart from the change lets too much in."""
        usage = fillable.usage()
        most: list[int] = []

        def work() -> None:
            for _ in turns(25):
                (key,) = self.fresh_keys(1)
                for size in (usage.capacity_bytes // 12, 10):  # replaced
                    fillable.put([key], parts_of([bytes(size)]))
                    most.append(fillable.usage().used_bytes)
                fillable.delete([key, key])

        self.in_threads(*[work] * 6)
        assert max(most) <= usage.capacity_bytes, f"`used_bytes` rose to {max(most)} of {usage.capacity_bytes}"
        self.must_be_empty(fillable, usage.used_bytes)


class ExpiryTests(TierKit):
    """Tests for a `ttl_tier`, whose time to live is unknown: one value is kept alive until another expires."""

    @pytest.fixture
    def expiring(self, ttl_tier: WatchedTier) -> WatchedTier:
        return self.watch(ttl_tier)

    def until_it_expires(self, tier: WatchedTier, key: PackedKey, meanwhile: Callable[[], object]) -> None:
        deadline = self.soon()
        while tier.contains([key]) == [FOUND]:
            assert time.monotonic() < deadline, f"The tier's value did not expire within {self.patience_s} s"
            meanwhile()
            time.sleep(0.02)

    @pytest.mark.parametrize("by", ["touch", "put"])
    def test_a_value_that_is_used_lives_longer(self, expiring: WatchedTier, by: str) -> None:
        """Where the machine was too busy for a use within half of a value's life, all begins again."""
        self.needs(expiring, by)
        *used, missing = self.fresh_keys(5)
        values = dict(zip(used, (b"first", os.urandom(_LARGE), b"", b"last"), strict=True))
        give_up = self.soon()
        while time.monotonic() < give_up:
            (left,) = self.fresh_keys(1)
            expiring.store_all(values)
            expiring.store(left, b"left")
            times = [time.monotonic()]

            def use(times: list[float] = times) -> None:
                if by == "touch":
                    expiring.touch([*used[:2], missing, *used[2:]])
                else:
                    expiring.store_all(values)
                times.append(time.monotonic())

            self.until_it_expires(expiring, left, use)
            lost = [len(value) for key, value in values.items() if expiring.load(key, len(value))[0] != len(value)]
            if not lost:
                break
            times.append(time.monotonic())
            longest = max(after - before for before, after in itertools.pairwise(times))
            kept = f"of {len(values)} values those of {lost} bytes are MISSING"
            assert longest >= (times[-1] - times[0]) / 2, f"{kept}: {by} did not prolong their life"
        else:
            pytest.skip("The machine is too busy for values that expire so soon")
        for key in used:
            self.until_it_expires(expiring, key, lambda: None)

    def test_a_value_expires(self, expiring: WatchedTier) -> None:
        (key,) = self.fresh_keys(1)
        known = expiring.capabilities()
        before = expiring.usage().used_bytes if "usage" in known else 0
        expiring.store(key, b"value")
        expiring.must_load(key, b"value")
        self.until_it_expires(expiring, key, lambda: None)
        expiring.must_answer(key, 5, MISSING)
        expiring.touch([key])
        assert expiring.contains([key]) == [MISSING], "`touch` revived an expired value"
        assert "scan" not in known or not expiring.listed([key]), "`scan` lists an expired value"
        give_up = self.soon()
        while "usage" in known and expiring.usage().used_bytes > before:
            assert time.monotonic() < give_up, "The tier's used_bytes count expired values"
            time.sleep(0.02)
        assert expiring.delete([key]) == [MISSING]
        expiring.store(key, b"again")
        expiring.must_load(key, b"again")


def used(entry: TierEntry, since: float = 0.0) -> float:
    assert entry.used_at is not None, "`scan` reports used_at for some values only"
    now = time.time()
    assert since - _CLOCK_S <= entry.used_at <= now + _CLOCK_S, (
        f"`used_at` is {entry.used_at!r}, not the Unix time in seconds of the last store or touch, now {now:.0f}"
    )
    return entry.used_at


class ListingTests(TierKit):
    """Tests for tiers that have `scan`. The store may hold other values than those of the tests."""

    @pytest.fixture
    def listed(self, watched: WatchedTier) -> WatchedTier:
        self.needs(watched, "scan")
        return watched

    def test_it_tells_when_a_value_was_used(self, listed: WatchedTier) -> None:
        touched, also, stored, left = keys = self.fresh_keys(4)
        began = time.time() - self.time_step_s
        listed.store_all(dict.fromkeys(keys, b"value"))
        first = listed.listed(keys)
        if all(entry.used_at is None for entry in first.values()):
            assert "usage" not in listed.capabilities(), "A tier with usage must report used_at in scan"
            pytest.skip("The tier does not know when a value was used")
        before = {key: used(entry, began) for key, entry in first.items()}
        time.sleep(2 * self.time_step_s)
        touched_at = time.time() - self.time_step_s
        listed.touch([touched, also])
        listed.store(stored, b"value")
        then = listed.listed(keys)
        moved = abs(used(then[left]) - before[left])
        assert moved <= self.time_step_s, "`used_at` of a value changed without a use"
        for key in (touched, also) if "touch" in listed.capabilities() else ():
            assert used(then[key], touched_at) > used(then[left]), "`touch` did not change used_at of the value"
        assert used(then[stored], touched_at) > used(then[left]), "`put` did not change used_at of the value"

    def test_a_scan_that_rests_holds_nothing(self, listed: WatchedTier) -> None:
        """The caller deletes what it was given, takes its time between two values, and may never go on."""
        keys = self.fresh_keys(6)
        listed.store_all(dict.fromkeys(keys, b"value"))
        resting = [listed.scan() for _ in range(3)]
        for entries in resting:
            next(entries)

        def work(tier: WatchedTier) -> None:
            (key,) = self.fresh_keys(1)
            tier.store(key, b"stored while a scan rests")
            tier.must_load(key, b"stored while a scan rests")
            deleted = tier.delete([key, keys[0]])[0]
            assert deleted is DELETED, "`delete` must return DELETED during a scan"
            tier.store(keys[0], b"again")
            tier.listed(keys)

        others = [self.another(listed)] if self.is_shared and self.can_reopen else []
        for tier in (listed, *others):
            self.in_threads(lambda tier=tier: work(tier), within_s=self.patience_s + self.grace_s)  # type: ignore[misc]
            work(tier)
        self.in_threads(listed.close, within_s=self.patience_s)
        with contextlib.suppress(TierError):
            next(resting[0])
        resting.clear()

    def test_it_goes_on_while_values_come_and_go(self, listed: WatchedTier) -> None:
        """What stays is listed once, whatever leaves and comes before and behind the place where the scan is."""
        stay, go, coming = (self.fresh_keys(MANY // 2) for _ in range(3))
        mixed = [key for pair in zip(stay, go, strict=True) for key in pair]
        for first in range(0, MANY, 250):
            listed.store_all(dict.fromkeys(mixed[first : first + 250], b"value"))
        staying, leaving, seen = set(stay), set(go), list[PackedKey]()
        for entry in listed.scan(deadline=time.monotonic() + 10 * self.patience_s):  # with a thousand calls between
            seen.append(entry.key)
            if entry.key in leaving:  # as the server does, which makes room
                leaving.discard(entry.key)
                listed.delete([entry.key])
            elif len(seen) % 4 == 0 and leaving:
                listed.delete([leaving.pop()])
            elif len(seen) % 2 and coming:
                listed.store(coming.pop(), b"value")
        assert len(seen) == len(set(seen)), "`scan` lists a value twice"
        missing = len(staying - set(seen))
        assert not missing, f"`scan` does not list {missing} of {len(stay)} values that stayed"
        assert listed.delete(stay) == [DELETED] * len(stay)
