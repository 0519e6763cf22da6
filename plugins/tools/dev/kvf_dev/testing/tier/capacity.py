"""Tests of tiers that have `usage`, whose values expire, or that have `scan`."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

import pytest

from kvf_dev.testing.tier.concurrency import turns
from kvf_dev.testing.tier.kit import DELETED, FAILED, FOUND, MISSING, STORED, TierKit
from kvf_dev.testing.tier.watched import due, said
from kvframework.api.tier import PackedKey, Tier, TierEntry
from kvframework.errors import TierError

LARGEST = 64 << 20


class CapacityTests(TierKit):
    """Tests for tiers that have `usage`."""

    @pytest.fixture
    def measured(self, watched: Tier) -> Tier:
        if "usage" not in watched.capabilities():
            pytest.skip("the tier has no usage")
        return watched

    @pytest.fixture
    def fillable(self, measured: Tier, request: pytest.FixtureRequest) -> Tier:
        measured.close()  # it may share its store with the small one, and refuse a second opener
        tier = self.watch(request.getfixturevalue("small_tier"))
        assert 0 < self.capacity_of(tier) <= LARGEST, "it holds more than 64 MiB"
        return tier

    def used_of(self, tier: Tier) -> int:
        return tier.usage(deadline=self.soon()).used_bytes

    def capacity_of(self, tier: Tier) -> int:
        return tier.usage(deadline=self.soon()).capacity_bytes

    def test_usage_follows_what_is_stored_and_deleted(self, measured: Tier) -> None:
        keys, nbytes = self.fresh_keys(3), 100_000
        before = self.used_of(measured)
        capacity = self.capacity_of(measured)
        assert 0 <= before < capacity, f"usage says {before} of {capacity} bytes: TierUsage(used_bytes, capacity_bytes)"
        for key in keys:
            held = self.used_of(measured)
            self.store(measured, key, os.urandom(nbytes))
            counted = self.used_of(measured) - held
            assert counted >= nbytes, f"a value of {nbytes} bytes was stored, and usage grew by {counted}"
        held = self.used_of(measured)
        self.store(measured, keys[0], os.urandom(nbytes))
        assert self.used_of(measured) < held + nbytes, "a value that was replaced is counted twice"
        assert measured.delete(keys[:1], deadline=self.soon()) == [DELETED]
        counted = held - self.used_of(measured)
        assert counted >= nbytes, f"a value of {nbytes} bytes was deleted, and usage shrank by {counted}"
        assert measured.delete(keys, deadline=self.soon()) == [MISSING, DELETED, DELETED]
        left = self.used_of(measured) - before
        assert left <= 0, f"{left} bytes are still in use after all was deleted"

    def test_what_is_put_beyond_the_capacity_is_refused_or_makes_room(self, fillable: Tier) -> None:
        capacity = self.capacity_of(fillable)
        nbytes = capacity // 20
        values: dict[bytes, bytes] = {}
        for key in self.fresh_keys(30):
            value = os.urandom(16) * (nbytes // 16)
            (outcome,) = fillable.put([key], [[memoryview(value)]], deadline=self.soon())
            assert self.used_of(fillable) <= capacity, "more is in use than the capacity"
            if outcome is STORED:
                values[key] = value
                self.must_load(fillable, key, value, "said to be stored, and is not there")
        assert len(values) >= 10, "it was full long before its capacity"

        buffers = [bytearray(len(value)) for value in values.values()]
        outcomes = fillable.get_into(list(values), self.parts_of(buffers), deadline=self.soon())
        expected = list(values.values())
        found = [index for index, received in enumerate(outcomes) if received == len(expected[index])]
        assert sum(len(buffers[index]) for index in found) <= capacity, "it holds more than it says it can"
        self.must_be([buffers[index] for index in found], [expected[index] for index in found])

        room = list(values)
        fillable.delete(room, deadline=self.soon())
        self.store(fillable, room[0], b"there is room again")
        self.must_load(fillable, room[0], b"there is room again")
        fillable.delete(room[:1], deadline=self.soon())

    def test_a_value_of_a_full_store_may_be_replaced(self, fillable: Tier) -> None:
        nbytes = self.capacity_of(fillable) // 20
        kept: list[bytes] = []
        for key in self.fresh_keys(30):
            if fillable.put([key], [[memoryview(bytes(nbytes))]], deadline=self.soon()) != [STORED]:
                break
            kept.append(key)
        assert kept, "it was full from the start"
        last = kept[-1]
        value = os.urandom(nbytes)
        outcomes = fillable.put([last], [[memoryview(value)]], deadline=self.soon())
        assert outcomes == [STORED], "the value that it replaces leaves room for one of its size"
        self.must_load(fillable, last, value)
        assert self.used_of(fillable) <= self.capacity_of(fillable), "more is in use than the capacity"
        fillable.delete(kept, deadline=self.soon())

    def test_what_is_replaced_and_deleted_leaves_nothing_behind(self, fillable: Tier) -> None:
        before, capacity = self.used_of(fillable), self.capacity_of(fillable)
        large, small = bytes(capacity // 10), bytes(capacity // 100)
        # Four times the capacity is written over the course of the loop.
        for turn, key in enumerate(self.fresh_keys(20)):
            for value in (large, small, large):
                stored = fillable.put([key], [[memoryview(value)]], deadline=self.soon())
                assert stored == [STORED], f"no room for a tenth of its capacity after {turn} values came and went"
            assert fillable.delete([key], deadline=self.soon()) == [DELETED]
        left = self.used_of(fillable) - before
        assert left <= 0, f"{left} bytes are still in use after all was deleted"
        self.must_take(fillable, 10, capacity // 20)

    def must_take(self, tier: Tier, count: int, nbytes: int) -> None:
        keys = self.fresh_keys(count)
        for key in keys:
            stored = tier.put([key], [[memoryview(bytes(nbytes))]], deadline=self.soon())
            assert stored == [STORED], "no room for half of its capacity after all was deleted"
        tier.delete(keys, deadline=self.soon())

    def test_one_value_that_does_not_fit_is_refused_alone(self, fillable: Tier) -> None:
        """What it would replace stays, or leaves whole."""
        one, huge, other = keys = self.fresh_keys(3)
        values, held = [b"one", bytes(self.capacity_of(fillable) + 1), b"other"], None
        for turn in range(3):
            try:
                outcomes = fillable.put(keys, self.parts_of(values), deadline=self.soon())
            except TierError as error:
                pytest.fail(f"one value that does not fit is no failure of the whole operation: {error.fact}")
            assert outcomes == [STORED, FAILED, STORED]
            assert fillable.contains([huge], deadline=self.soon()) == [MISSING], "what was refused is there"
            held = self.used_of(fillable) if held is None else held
            assert self.used_of(fillable) <= held, f"a refused value is counted, after {turn + 1} of them"
        self.must_load(fillable, one, b"one")
        self.must_load(fillable, other, b"other")
        assert fillable.put([one], self.parts_of(values[1:2]), deadline=self.soon()) == [FAILED]
        received, found = self.load(fillable, one, 3)
        assert received is MISSING or (received, found) == (3, b"one"), "neither the old value nor none"
        fillable.delete(keys, deadline=self.soon())

    def test_usage_is_right_after_concurrent_calls(self, fillable: Tier) -> None:
        """A sum that threads change without a lock drifts; a check that is apart from the change lets too much in."""
        before, capacity = self.used_of(fillable), self.capacity_of(fillable)
        nbytes = capacity // 12
        most: list[int] = []

        def work() -> None:
            for _ in turns(25):
                (key,) = self.fresh_keys(1)
                for size in (nbytes, 10):  # replaced
                    fillable.put([key], [[memoryview(bytes(size))]], deadline=self.soon())
                    most.append(self.used_of(fillable))
                fillable.delete([key, key], deadline=self.soon())

        self.in_threads(*[work] * 6)
        assert max(most) <= capacity, f"{max(most)} bytes were in use at once, of {capacity}"
        drift = self.used_of(fillable) - before
        assert drift == 0, f"usage is {drift} bytes from what it was before, when the same values were there"
        self.must_take(fillable, 6, nbytes)

    def test_usage_counts_what_was_there_before(self, measured: Tier) -> None:
        if not (self.persistent and self.can_reopen):
            pytest.skip("values end with the tier, or there is no `reopen`")
        keys, nbytes = self.fresh_keys(3), 100_000
        for key in keys:
            self.store(measured, key, os.urandom(nbytes))
        held = self.used_of(measured)
        measured.close()
        again = self.another(measured)
        assert self.used_of(again) == held, "usage after the store was opened again, and before"
        assert again.delete(keys, deadline=self.soon()) == [DELETED] * 3
        left = self.used_of(again) - (held - 3 * nbytes)
        assert left <= 0, f"{left} bytes are still in use after all was deleted"


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
            give_up = self.soon()
            while expiring.usage(deadline=self.soon()).used_bytes > before:
                assert time.monotonic() < give_up, "what has expired is counted"
                time.sleep(0.02)


def _timed(call: Callable[[], object], times: list[float]) -> None:
    call()
    times.append(time.monotonic())


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
