"""Tests of tiers that have `usage`: it follows the stored bytes, and a full tier refuses or makes room."""

from __future__ import annotations

import os
import time

import pytest

from kvframework.api.tier import Tier
from kvframework.errors import TierError
from kvframework.testing.tier.kit import DELETED, FAILED, FOUND, STORED, TierKit

LARGEST = 64 << 20


class CapacityTests(TierKit):
    """Tests for tiers that have `usage`."""

    @pytest.fixture
    def measured(self, tier: Tier) -> Tier:
        if "usage" not in tier.capabilities():
            pytest.skip("the tier has no usage")
        return tier

    @pytest.fixture
    def fillable(self, measured: Tier, request: pytest.FixtureRequest) -> Tier:
        tier: Tier = request.getfixturevalue("small_tier")
        assert 0 < self.capacity_of(tier) <= LARGEST, "it holds more than 64 MiB"
        return tier

    def used_of(self, tier: Tier) -> int:
        return tier.usage(deadline=self.soon()).used_bytes

    def capacity_of(self, tier: Tier) -> int:
        return tier.usage(deadline=self.soon()).capacity_bytes

    def test_usage_follows_what_is_stored_and_deleted(self, measured: Tier) -> None:
        keys, nbytes = self.fresh_keys(3), 100_000
        before = self.used_of(measured)
        assert 0 <= before < self.capacity_of(measured)
        for key in keys:
            held = self.used_of(measured)
            self.store(measured, key, os.urandom(nbytes))
            assert self.used_of(measured) >= held + nbytes
        held = self.used_of(measured)
        self.store(measured, keys[0], os.urandom(nbytes))
        assert self.used_of(measured) < held + nbytes, "a value that was replaced is counted twice"
        assert measured.delete(keys[:1], deadline=self.soon()) == [DELETED]
        assert self.used_of(measured) <= held - nbytes
        assert measured.delete(keys, deadline=self.soon())[1:] == [DELETED, DELETED]
        assert self.used_of(measured) <= before

    def test_usage_of_a_late_call_is_refused(self, measured: Tier) -> None:
        self.must_raise("usage", lambda: measured.usage(deadline=time.monotonic() - 1), "the deadline has passed")

    def test_what_is_put_beyond_the_capacity_is_refused_or_makes_room(self, fillable: Tier) -> None:
        capacity = self.capacity_of(fillable)
        nbytes = capacity // 20
        values: dict[bytes, bytes] = {}
        for key in self.fresh_keys(30):
            value = os.urandom(16) * (nbytes // 16)
            (outcome,) = fillable.put([key], [[memoryview(value)]], deadline=self.soon())
            assert outcome in (STORED, FAILED)
            assert self.used_of(fillable) <= capacity
            if outcome is STORED:
                values[key] = value
                self.must_load(fillable, key, value, "said to be stored, and is not there")
        assert len(values) >= 10, "it was full long before its capacity"

        buffers = [bytearray(len(value)) for value in values.values()]
        outcomes = fillable.get_into(list(values), self.parts_of(buffers), deadline=self.soon())
        expected = list(values.values())
        found = [index for index, received in enumerate(outcomes) if received == len(expected[index])]
        assert sum(len(buffers[index]) for index in found) <= capacity, "it holds more than it says it can"
        assert all(buffers[index] == expected[index] for index in found)

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
        assert self.used_of(fillable) <= self.capacity_of(fillable)
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
        keys, value = self.fresh_keys(10), bytes(capacity // 20)
        for key in keys:
            stored = fillable.put([key], [[memoryview(value)]], deadline=self.soon())
            assert stored == [STORED], "no room for half of its capacity after all was deleted"
        fillable.delete(keys, deadline=self.soon())

    def test_a_value_larger_than_the_capacity_is_refused(self, fillable: Tier) -> None:
        kept, huge = self.fresh_keys(2)
        self.store(fillable, kept, b"kept")
        value = bytearray(self.capacity_of(fillable) + 1)
        try:
            assert fillable.put([huge], [[memoryview(value)]], deadline=self.soon()) == [FAILED]
        except TierError:
            pytest.fail("one value that does not fit is no failure of the whole operation")
        assert fillable.contains([huge], deadline=self.soon()) != [FOUND]
        assert self.used_of(fillable) <= self.capacity_of(fillable)
