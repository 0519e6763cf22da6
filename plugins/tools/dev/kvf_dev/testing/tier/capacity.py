"""Tests of tiers that have `usage`: it follows the stored bytes, and a full tier refuses or makes room."""

from __future__ import annotations

import os
import time

import pytest

from kvf_dev.testing.tier.concurrency import turns
from kvf_dev.testing.tier.kit import DELETED, FAILED, MISSING, STORED, TierKit
from kvframework.api.tier import Tier
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

    def test_usage_of_a_late_call_is_refused(self, measured: Tier) -> None:
        self.must_raise("usage", lambda: measured.usage(deadline=time.monotonic() - 1), "the deadline has passed")

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

    def test_a_value_larger_than_the_capacity_is_refused(self, fillable: Tier) -> None:
        kept, huge = self.fresh_keys(2)
        self.store(fillable, kept, b"kept")
        held = self.used_of(fillable)
        value = bytearray(self.capacity_of(fillable) + 1)
        for turn in range(3):
            try:
                assert fillable.put([huge], [[memoryview(value)]], deadline=self.soon()) == [FAILED]
            except TierError:
                pytest.fail("one value that does not fit is no failure of the whole operation")
            assert fillable.contains([huge], deadline=self.soon()) == [MISSING], "what was refused is there"
            assert self.used_of(fillable) <= held, f"a refused value is counted, after {turn + 1} of them"

    def test_one_value_that_does_not_fit_spoils_no_other_of_its_batch(self, fillable: Tier) -> None:
        one, _, other = keys = self.fresh_keys(3)
        values = [b"one", bytes(self.capacity_of(fillable) + 1), b"other"]
        try:
            outcomes = fillable.put(keys, self.parts_of(values), deadline=self.soon())
        except TierError as error:
            pytest.fail(f"one value that does not fit is no failure of the whole operation: {error.fact}")
        assert outcomes == [STORED, FAILED, STORED]
        self.must_load(fillable, one, b"one")
        self.must_load(fillable, other, b"other")
        assert fillable.delete(keys, deadline=self.soon()) == [DELETED, MISSING, DELETED]

    def test_a_value_that_cannot_be_replaced_stays_or_leaves_whole(self, fillable: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(fillable, key, b"old value")
        huge = bytes(self.capacity_of(fillable) + 1)
        assert fillable.put([key], [[memoryview(huge)]], deadline=self.soon()) == [FAILED]
        received, found = self.load(fillable, key, 9)
        assert received in (9, MISSING), "neither the old value nor none"
        assert received is MISSING or found == b"old value", "other bytes than the old value's"

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
