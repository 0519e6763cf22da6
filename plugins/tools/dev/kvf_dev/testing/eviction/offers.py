"""Tests of the victims on offer: every object that is in L1, each once, whatever the history."""

from __future__ import annotations

import pytest

from kvf_dev.testing.eviction.kit import MIB, EvictionKit, MakePolicy, WatchedPolicy, fresh_keys, insert, must_offer
from kvframework.api.eviction import EvictionPolicy
from kvframework.api.keys import PACKED_KEY_BYTES


class OfferTests(EvictionKit):
    """Calls in sequence."""

    def test_it_has_the_plugins_name(self, policy: EvictionPolicy) -> None:
        self.must_be_named(policy.name)

    # which keys are offered

    def test_nothing_is_offered_where_nothing_is(self, policy: EvictionPolicy) -> None:
        must_offer(policy, [])
        (key,) = fresh_keys(1)
        policy.on_insert(key, MIB)
        policy.on_remove(key)
        must_offer(policy, [])

    def test_all_that_is_in_is_offered_once(self, policy: EvictionPolicy) -> None:
        keys = fresh_keys(300)
        insert(policy, keys)
        for turn in range(5):  # the first keys are used once, the last ones five times
            for key in keys[turn * 60 :]:
                policy.on_access(key)
        must_offer(policy, keys)
        for key in keys[::3]:
            policy.on_remove(key)
        must_offer(policy, [key for index, key in enumerate(keys) if index % 3])

    def test_many_accesses_at_once_are_as_many_one_by_one(self, make_policy: MakePolicy) -> None:
        """Equivalence holds for a key that is in the batch twice, too. A policy that draws lots has no order to
        compare."""
        one_by_one, again, at_once = policies = [WatchedPolicy(make_policy()) for _ in range(3)]
        keys = fresh_keys(40)
        for policy in policies:
            insert(policy, keys)
        for batch in (keys[5:30], keys[::-3], [*keys[7:9], *keys[8:10]], keys[:1] * 5, [*keys[3:6], keys[3]], []):
            for key in batch:
                one_by_one.on_access(key)
                again.on_access(key)
            at_once.on_access_many(batch)
            order = list(one_by_one.victims())
            if order == list(again.victims()) == list(one_by_one.victims()):
                assert order == list(at_once.victims()), "in another order than one by one"
            must_offer(at_once, keys)

    @pytest.mark.parametrize("count", [1000, 1025, 8192])
    def test_every_key_of_a_large_batch_counts(self, make_policy: MakePolicy, count: int) -> None:
        """A request has up to 8,192 objects. Each batch comes twice, as some policies count from the second use on."""
        one_by_one, again, at_once = policies = [WatchedPolicy(make_policy()) for _ in range(3)]
        keys = fresh_keys(count)
        for policy in policies:
            insert(policy, keys)
        for batch in (keys, keys[::-1], [key for key in keys[: count // 2] for _ in range(2)]):
            for _ in range(2):
                for key in batch:
                    one_by_one.on_access(key)
                    again.on_access(key)
                at_once.on_access_many(batch)
            order = list(one_by_one.victims())
            if order == list(again.victims()):
                found = enumerate(zip(order, at_once.victims(), strict=False))
                at = next((at for at, (key, other) in found if key != other), None)
                assert at is None, f"{len(batch)} keys at once: victim {at} is another than one by one"

    def test_a_key_that_comes_again_is_in_once(self, policy: EvictionPolicy) -> None:
        keys = fresh_keys(20)
        for turn in range(4):
            insert(policy, keys, nbytes=MIB << turn)
            for key in keys[turn:]:
                policy.on_access(key)
            must_offer(policy, keys)
            for key in list(policy.victims()) if turn % 2 else keys:
                policy.on_remove(key)
            must_offer(policy, [])

    def test_keys_are_equal_by_their_bytes(self, policy: EvictionPolicy) -> None:
        keys = fresh_keys(10)
        insert(policy, keys)
        copies = [bytes(bytearray(key)) for key in keys]
        for key in copies:
            policy.on_access(key)
        for key in copies[:5]:
            policy.on_remove(key)
        must_offer(policy, keys[5:])

    def test_keys_that_differ_in_one_byte_are_different(self, policy: EvictionPolicy) -> None:
        """Keys of one chunk differ in rank, layer group or salt alone."""
        keys = [bytes(index == at for index in range(PACKED_KEY_BYTES)) for at in range(PACKED_KEY_BYTES)]
        insert(policy, keys)
        policy.on_access(keys[0])
        policy.on_remove(keys[-1])
        must_offer(policy, keys[:-1])

    def test_any_size_is_taken(self, policy: EvictionPolicy) -> None:
        keys = fresh_keys(8)
        for key, nbytes in zip(keys, (1, 1 << 40, 4096, 1, 3, 1 << 40, MIB, 1), strict=True):
            policy.on_insert(key, nbytes)
        must_offer(policy, keys)
        while len(keys) > 1:
            policy.on_remove(keys.pop(1))
            must_offer(policy, keys)

    def test_two_policies_have_nothing_in_common(self, make_policy: MakePolicy) -> None:
        one, other = (WatchedPolicy(make_policy()) for _ in range(2))
        keys = fresh_keys(4)
        insert(one, keys)
        must_offer(other, [])
        insert(other, keys[:2])
        other.on_remove(keys[0])
        must_offer(one, keys)
