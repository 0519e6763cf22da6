"""Tests of what a policy remembers: as much as it holds, and a bounded number of keys besides."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from itertools import islice

import pytest

from kvf_dev.testing.eviction.kit import MIB, EvictionKit, fresh_keys, insert, must_offer
from kvframework.api.eviction import EvictionPolicy

_TIMES = 6000
# More than a counter of 16 bits holds.
_USES = 70_000
_LARGE = 20_000


class MemoryTests(EvictionKit):
    """A policy lives as long as the server."""

    def grown(self, work: Callable[[int], object], before: int) -> int:
        """Return by how many bytes the memory grows while `work` is repeated `_TIMES` times, after `before` times."""
        tracemalloc.start()
        try:
            for index in range(before):
                work(index)
            held = tracemalloc.get_traced_memory()[0]
            for index in range(_TIMES):
                work(index)
            return tracemalloc.get_traced_memory()[0] - held
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("leaves", ["evicted", "dropped"])
    @pytest.mark.parametrize("uses", [0, 1, 2, 5])
    def test_what_has_left_is_forgotten(self, policy: EvictionPolicy, uses: int, leaves: str) -> None:
        """A policy may remember at most `remembered_keys` keys of removed objects, however often they were used and
        however they left."""

        def come_and_go(_index: int) -> None:
            (key,) = fresh_keys(1)
            policy.on_insert(key, MIB)
            for use in range(uses):
                if use % 2:
                    policy.on_access_many([key])
                else:
                    policy.on_access(key)
            policy.on_remove(next(policy.victims()) if leaves == "evicted" else key)

        insert(policy, fresh_keys(100))
        grown = self.grown(come_and_go, self.remembered_keys + 1000)
        assert grown < _TIMES * 16, (
            f"{grown} bytes are kept of {_TIMES} objects that came, were used {uses} times and went"
        )

    def test_uses_are_not_kept_one_by_one(self, policy: EvictionPolicy) -> None:
        keys = fresh_keys(100)
        insert(policy, keys)

        def use(index: int) -> None:
            policy.on_access(keys[index % 100])
            policy.on_access_many(keys[index % 90 :][:3])

        grown = self.grown(use, 3000)
        assert grown < _TIMES * 16, f"{grown} bytes are kept of {_TIMES} uses of 100 objects"
        must_offer(policy, keys)

    def test_walks_are_not_kept(self, policy: EvictionPolicy) -> None:
        keys = fresh_keys(100)
        insert(policy, keys)
        grown = self.grown(lambda _: list(islice(policy.victims(), 2)), 1000)
        assert grown < _TIMES * 16, f"{grown} bytes are kept of {_TIMES} walks that ended early"
        must_offer(policy, keys)

    def test_an_object_may_be_used_very_often(self, policy: EvictionPolicy) -> None:
        keys = fresh_keys(3)
        insert(policy, keys)
        for _ in range(_USES // 1000):
            policy.on_access_many(keys[:1] * 1000)
        must_offer(policy, keys)

    def test_as_many_objects_as_a_large_l1_holds_are_offered(self, policy: EvictionPolicy) -> None:
        keys = fresh_keys(_LARGE)
        insert(policy, keys)
        for first in range(0, _LARGE, 8192):
            policy.on_access_many(tuple(keys[first : first + 8192]))
        must_offer(policy, keys)
        for key in keys[::2]:
            policy.on_remove(key)
        must_offer(policy, keys[1::2])
