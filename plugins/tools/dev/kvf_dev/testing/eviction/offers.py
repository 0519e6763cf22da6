"""Tests of the victims on offer, and of a policy as the core uses it: a walk stops anywhere, several threads call."""

from __future__ import annotations

import itertools
from itertools import islice
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from kvf_dev.testing.eviction.kit import MIB, EvictionKit, MakePolicy, WatchedPolicy, fresh_keys, insert, must_offer
from kvframework.api.eviction import EvictionPolicy, PackedKey
from kvframework.api.keys import PACKED_KEY_BYTES


class OfferTests(EvictionKit):
    """Calls in sequence."""

    def test_it_has_the_plugins_name(self, policy: EvictionPolicy) -> None:
        self.must_be_named(policy.name)

    # which keys are offered

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

    @pytest.mark.parametrize("count", [40, 1000, 1025, 8192])
    def test_many_accesses_at_once_are_as_many_one_by_one(self, make_policy: MakePolicy, count: int) -> None:
        """A request has up to 8,192 objects. Each batch comes twice, as some policies count from the second use on. A
        policy that draws lots has no order to compare."""
        one_by_one, again, at_once = policies = [WatchedPolicy(make_policy()) for _ in range(3)]
        keys = fresh_keys(count)
        for policy in policies:
            insert(policy, keys)
        batches = [keys[5:30], keys[::-3], [*keys[7:9], *keys[8:10]], keys[:1] * 5, [*keys[3:6], keys[3]], []]
        if count > 40:
            batches = [keys, keys[::-1], [key for key in keys[: count // 2] for _ in range(2)]]
        for batch in [each for each in batches for _ in range(2)]:
            for key in batch:
                one_by_one.on_access(key)
                again.on_access(key)
            at_once.on_access_many(batch)
            order, other = list(one_by_one.victims()), list(at_once.victims())
            if order == list(again.victims()) == list(one_by_one.victims()) and order != other:
                at = next(at for at, pair in enumerate(itertools.zip_longest(order, other)) if pair[0] != pair[1])
                pytest.fail(f"{len(batch)} keys at once: victim {at} is another than one by one")
            must_offer(at_once, keys)

    def test_keys_that_differ_in_one_byte_are_different(self, policy: EvictionPolicy) -> None:
        """Keys of one chunk differ in rank, layer group or salt alone."""
        keys = [bytes(index == at for index in range(PACKED_KEY_BYTES)) for at in range(PACKED_KEY_BYTES)]
        insert(policy, keys)
        policy.on_access(keys[0])
        policy.on_remove(keys[-1])
        must_offer(policy, keys[:-1])

    def test_two_policies_have_nothing_in_common(self, make_policy: MakePolicy) -> None:
        one, other = (WatchedPolicy(make_policy()) for _ in range(2))
        keys = fresh_keys(4)
        insert(one, keys)
        must_offer(other, [])
        insert(other, keys[:2])
        other.on_remove(keys[0])
        must_offer(one, keys)


class ServingTests(EvictionKit):
    """The policy compared with a set, and called by several threads."""

    def test_it_behaves_like_a_set(self, make_policy: MakePolicy) -> None:
        class Machine(_Machine):
            make = staticmethod(make_policy)

        # Some releases of hypothesis have no types for it.
        run_state_machine_as_test(  # type: ignore[no-untyped-call, unused-ignore]
            Machine,
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=30,
                deadline=None,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )

    def test_any_thread_may_call(self, policy: EvictionPolicy) -> None:
        """One thread at a time calls: the core holds the storage lock."""
        keys = fresh_keys(6)

        def access() -> None:
            for key in keys:
                policy.on_access(key)

        walks = []

        def leave_a_walk() -> None:
            walk = policy.victims()
            next(walk)
            walks.append(walk)

        for step in (
            lambda: insert(policy, keys),
            access,
            leave_a_walk,
            lambda: policy.on_access_many(keys),
            lambda: policy.on_remove(keys[0]),
            lambda: must_offer(policy, keys[1:]),
        ):
            self.in_threads(step, within_s=10.0)
        must_offer(policy, keys[1:])


def _key(number: int) -> PackedKey:
    """Another object each time: keys are equal by their bytes."""
    return bytes([number]) * PACKED_KEY_BYTES


class _Machine(RuleBasedStateMachine):
    """One policy, and the set of keys that it should hold."""

    make: ClassVar[MakePolicy]

    def __init__(self) -> None:
        super().__init__()
        self._policy = WatchedPolicy(type(self).make())
        self._inside: set[PackedKey] = set()

    @rule(number=st.integers(0, 7), nbytes=st.sampled_from([1, 4096, MIB, 3 * MIB, 1 << 40]))
    def insert_or_access(self, number: int, nbytes: int) -> None:
        key = _key(number)
        if key in self._inside:
            self._policy.on_access(key)
        else:
            self._policy.on_insert(key, nbytes)
            self._inside.add(key)

    @rule(number=st.integers(0, 7))
    def remove(self, number: int) -> None:
        if (key := _key(number)) in self._inside:
            self._policy.on_remove(key)
            self._inside.remove(key)

    @precondition(lambda self: self._inside)
    @rule(count=st.integers(1, 4), kept=st.sets(st.integers(0, 3)))
    def evict(self, count: int, kept: set[int]) -> None:
        offered = list(islice(self._policy.victims(), count))
        wanted = min(count, len(self._inside))
        assert len(offered) == len(set(offered)) == wanted, f"{len(set(offered))} keys are offered, of {wanted}"
        for index, key in enumerate(offered):
            if index not in kept:
                assert key in self._inside, "a key is offered that is not in"
                self._policy.on_remove(key)
                self._inside.remove(key)

    @rule()
    def ask_for_all(self) -> None:
        must_offer(self._policy, self._inside)

    def teardown(self) -> None:
        must_offer(self._policy, self._inside)
