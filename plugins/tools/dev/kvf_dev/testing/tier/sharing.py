"""Tests of `shared` tiers: two, as of two nodes, on one store at the same time."""

from __future__ import annotations

import os

import pytest

from kvf_dev.testing.tier.kit import DAMAGED, DELETED, FOUND, MISSING, STORED, TierKit
from kvframework.api.tier import Tier


class SharingTests(TierKit):
    """For tiers that are `shared`."""

    @pytest.fixture
    def other(self, watched: Tier) -> Tier:
        """A second tier over the store of `tier`."""
        if not self.is_shared:
            pytest.skip("the tier is not shared")
        if not self.use and type(self).reopen is TierKit.reopen:
            pytest.fail("the tier is shared: give `reopen(tier)`, a second tier over the same store")
        return self.another(watched)

    def test_each_sees_what_the_other_stores(self, watched: Tier, other: Tier) -> None:
        one, two = self.fresh_keys(2)
        value = os.urandom(70_000)
        self.store(watched, one, value)
        self.store(other, two, b"of the other")
        assert other.contains([one, two], deadline=self.soon()) == [FOUND, FOUND]
        self.must_load(other, one, value)
        self.must_load(watched, two, b"of the other")
        self.store(other, one, b"replaced")
        self.must_load(watched, one, b"replaced")
        self.store(other, one, b"replaced by more")
        self.must_answer(watched, one, 8, DAMAGED)
        self.must_load(watched, one, b"replaced by more")

    def test_each_sees_what_the_other_deletes(self, watched: Tier, other: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, b"value")
        self.must_load(other, key, b"value")
        assert other.delete([key], deadline=self.soon()) == [DELETED]
        assert watched.contains([key], deadline=self.soon()) == [MISSING]
        self.must_answer(watched, key, 5, MISSING)
        assert watched.delete([key], deadline=self.soon()) == [MISSING]

    def test_closing_one_leaves_the_other_at_work(self, watched: Tier, other: Tier) -> None:
        (key,) = self.fresh_keys(1)
        self.store(watched, key, b"value")
        watched.close()
        self.must_load(other, key, b"value")
        self.store(other, key, b"again")
        self.must_load(other, key, b"again")

    def test_two_at_work_on_the_same_keys_see_whole_values(self, watched: Tier, other: Tier) -> None:
        keys, size = self.fresh_keys(2), 50_000
        for key in keys:
            self.store(watched, key, b"\x09" * size)

        def work(mine: Tier, byte: int) -> None:
            for _ in range(20):
                values = [bytes([byte]) * size for _ in keys]
                assert mine.put(keys, self.parts_of(values), deadline=self.soon()) == [STORED] * len(keys)
                buffers = [bytearray(size) for _ in keys]
                assert mine.get_into(keys, self.parts_of(buffers), deadline=self.soon()) == [size] * len(keys)
                for buffer in buffers:
                    assert buffer == buffer[:1] * size, "bytes of several values, or of none, in one"
                    assert buffer[0] in (1, 2, 9), "bytes that nobody stored"

        self.in_threads(lambda: work(watched, 1), lambda: work(other, 2))
