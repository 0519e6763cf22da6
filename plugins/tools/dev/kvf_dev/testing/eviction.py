"""The conformance kit for eviction policies: tests that every `EvictionPolicy` must pass, see docs/plugins/eviction.md.

The kit does not judge the choice of victims: test that beside the kit. Needs pytest and hypothesis.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvf_dev.testing.kit import NamedKit, load
from kvframework.api.eviction import EvictionPolicy, EvictionProvider, Hint, PackedKey, RequestFacts, Use, Why
from kvframework.api.keys import PACKED_KEY_BYTES

MakePolicy = Callable[[], EvictionPolicy]
MIB = 1 << 20
# Of which sequences are made.
_HINTS = st.sampled_from(["", "done", "keep"])
_NUMBERS = st.integers(0, 7)
_SIZES = st.sampled_from([1, 4096, MIB, 3 * MIB, 1 << 40])
_CALLS = ["on_access", "on_access_many", "victims", "ten_victims", "on_remove", "on_insert"]
_TIMES = 6000
# More than a counter of 16 bits holds.
_USES = 70_000
_LARGE = 20_000
# Calls of each kind that are timed, and the objects in the policy. Where the time of an insert follows their number, so
# many inserts take minutes; the smaller number shows it in seconds.
_TIMED_ROUNDS, _TIMED_FEW, _TIMED_MANY = 25, 300, (8_000, 30_000)
_SLACK_S, _LONG_S = 60e-6, 1e-3


def fresh_keys(count: int) -> list[PackedKey]:
    return [os.urandom(PACKED_KEY_BYTES) for _ in range(count)]


def insert(policy: EvictionPolicy, keys: Iterable[PackedKey], nbytes: int = MIB) -> None:
    for key in keys:
        policy.on_insert(key, nbytes)


def must_offer(policy: EvictionPolicy, keys: Iterable[PackedKey]) -> list[PackedKey]:
    wanted, offered = set(keys), dict[PackedKey, None]()
    for key in walk(policy):
        # Not all at once: a walk may have no end.
        assert key not in offered, "`victims` offers a key twice"
        assert key in wanted, "`victims` offers a key that the policy does not hold"
        offered[key] = None
    missing = len(wanted) - len(offered)
    assert not missing, f"`victims` does not offer {missing} of {len(wanted)} keys that the policy holds"
    return list(offered)


def walk(policy: EvictionPolicy) -> Iterator[PackedKey]:
    victims = policy.victims()
    assert isinstance(victims, Iterator), f"`victims` returned a {type(victims).__name__}, not an iterator"
    for key in victims:
        assert isinstance(key, bytes), f"`victims` offers a {type(key).__name__}, not a key of bytes"
        yield key


def _facts(hint: Hint, at: float, *, use: Use = "store", objects: int = 0, held: int = 20) -> RequestFacts:
    """The facts of a separate request for so many objects; what should be kept, for half a minute."""
    is_kept = hint == "keep"
    return RequestFacts(
        use=use,
        at=at,
        request_id=f"{hint} {at}",
        tenant="t",
        chunk_tokens=256,
        compute_s=1e-4,
        load_s=1e-9,
        hint=hint,
        keep_s=30.0 * is_kept,
        priority=100 * is_kept,
        sizes=[MIB] * objects * is_kept,
        held=held * MIB,
    )


class _Machine(RuleBasedStateMachine):
    """One policy, and the set of keys that it should hold. Only keys that are in are used and removed, only others are
    inserted, as the core does. What is drawn does not depend on what is in: a policy may draw lots."""

    make: ClassVar[MakePolicy]

    def __init__(self) -> None:
        super().__init__()
        self._policy = type(self).make()
        self._inside: set[PackedKey] = set()
        self._at = 0.0

    @rule(number=_NUMBERS, nbytes=_SIZES)
    def insert_or_access(self, number: int, nbytes: int) -> None:
        key = _key(number)
        if key in self._inside:
            self._policy.on_access(key)
        else:
            self._policy.on_insert(key, nbytes)
            self._inside.add(key)

    @rule(number=_NUMBERS)
    def remove(self, number: int) -> None:
        if (key := _key(number)) in self._inside:
            self._policy.on_remove(key)
            self._inside.remove(key)

    @rule(
        numbers=st.lists(_NUMBERS, unique=True),
        use=st.sampled_from(["store", "lookup", "retrieve", "load", "recovered"]),
        hint=_HINTS,
        known=st.booleans(),
        later_s=st.sampled_from([0.0, 1.0, 90.0]),
    )
    def request(self, numbers: list[int], use: Use, hint: Hint, known: bool, later_s: float) -> None:
        """A request uses what is in, asks what of the rest it may insert, and inserts all; with all facts or none."""
        self._at += later_s
        keys = tuple(_key(number) for number in numbers)
        used, new = (tuple(key for key in keys if (key in self._inside) is there) for there in (True, False))
        sizes, chunks = (MIB,) * len(new), tuple(range(len(new))) if known else (-1,) * len(new)
        facts = _facts(hint, self._at, use=use, objects=len(new)) if known else RequestFacts(use=use, at=self._at)
        self._policy.on_uses(used, facts)
        admitted = self._policy.admits(new, sizes, chunks, facts)
        is_count = isinstance(admitted, int) and not isinstance(admitted, bool) and 0 <= admitted <= len(new)
        assert is_count, f"`admits` returned {str(admitted)[:80]}, not a number from 0 to {len(new)}"
        self.ask_for_all()  # what was asked for may still not come, and what was refused come by another request
        self._policy.on_inserts(new, sizes, chunks, facts)
        self._inside.update(new)

    @rule(numbers=st.lists(_NUMBERS, unique=True), why=st.sampled_from(["evicted", "removed", "cleared"]))
    def removals(self, numbers: list[int], why: Why) -> None:
        keys = tuple(key for key in map(_key, numbers) if key in self._inside)
        self._policy.on_removes(keys, why)
        self._inside.difference_update(keys)

    @rule(count=st.integers(1, 4), kept=st.sets(st.integers(0, 3)))
    def evict(self, count: int, kept: set[int]) -> None:
        offered = list(islice(walk(self._policy), count))
        wanted = min(count, len(self._inside))
        assert len(offered) == len(set(offered)) == wanted, f"`victims` offers {len(set(offered))} of {wanted} keys"
        for index, key in enumerate(offered):
            if index not in kept:
                assert key in self._inside, "`victims` offers a key that the policy does not hold"
                self._policy.on_remove(key)
                self._inside.remove(key)

    @rule()
    def ask_for_all(self) -> None:
        must_offer(self._policy, self._inside)

    def teardown(self) -> None:
        must_offer(self._policy, self._inside)


def _key(number: int) -> PackedKey:
    return bytes([number]) * PACKED_KEY_BYTES


def _seconds(policy: EvictionPolicy, size: int) -> dict[str, float]:
    taken: dict[str, float] = dict.fromkeys(_CALLS, 1e9)

    def measure(call: str, work: Callable[[], object]) -> object:
        began = time.perf_counter()
        answer = work()
        taken[call] = min(taken[call], time.perf_counter() - began)
        return answer

    # Only keys that are in are used, as the core does.
    keys = [number.to_bytes(PACKED_KEY_BYTES, "big") for number in range(size + _TIMED_ROUNDS)]
    insert(policy, keys[:size])
    inside = dict.fromkeys(keys[:size])
    for new in keys[size:]:
        used, *batch = islice(reversed(inside), 3)
        measure("on_access", lambda used=used: policy.on_access(used))  # type: ignore[misc]
        measure("on_access_many", lambda batch=batch: policy.on_access_many(batch))  # type: ignore[misc]
        victim = measure("victims", lambda: next(policy.victims()))
        measure("ten_victims", lambda: list(islice(policy.victims(), 10)))
        assert isinstance(victim, bytes), f"`victims` offers a {type(victim).__name__}, not a key of bytes"
        measure("on_remove", lambda victim=victim: policy.on_remove(victim))  # type: ignore[misc]
        del inside[victim]
        measure("on_insert", lambda new=new: policy.on_insert(new, MIB))  # type: ignore[misc]
        inside[new] = None
    return taken


class EvictionConformance(NamedKit):
    """Base class of an author's test class, which gives `use`, or a fixture `make_policy`: a factory of policies."""

    _descriptor = EvictionProvider

    examples: ClassVar[int] = 60
    """How many sequences of calls are compared with a set."""

    remembered_keys: ClassVar[int] = 4096
    """How many keys of removed objects the policy may remember, however few it holds."""

    @pytest.fixture
    def make_policy(self) -> MakePolicy:
        return self.by_name()

    @pytest.fixture
    def policy(self, make_policy: MakePolicy) -> EvictionPolicy:
        return make_policy()

    def test_it_has_the_plugins_name(self, policy: EvictionPolicy) -> None:
        self.must_be_named(policy.name)

    @pytest.mark.parametrize("count", [300, _LARGE])
    def test_all_that_is_in_is_offered_once(self, policy: EvictionPolicy, count: int) -> None:
        """Also what a large L1 holds; and keys of one chunk that differ in rank, layer group or salt alone."""
        alike = [bytes(index == at for index in range(PACKED_KEY_BYTES)) for at in range(PACKED_KEY_BYTES)]
        keys = fresh_keys(count) + alike
        insert(policy, keys)
        for turn in range(5):  # the first keys are used once, the last ones five times
            for key in keys[turn * 60 :][:300]:
                policy.on_access(key)
        for first in range(0, count if count == _LARGE else 0, 8192):
            policy.on_access_many(tuple(keys[first : first + 8192]))
        must_offer(policy, keys)
        for key in keys[::3]:
            policy.on_remove(key)
        must_offer(policy, [key for index, key in enumerate(keys) if index % 3])

    @pytest.mark.parametrize("count", [40, 1000, 1025, 8192])
    def test_many_accesses_at_once_are_as_many_one_by_one(self, make_policy: MakePolicy, count: int) -> None:
        """Each batch comes twice, as some policies count from the second use on. One that draws lots has no order."""
        one_by_one, again, at_once = policies = [make_policy() for _ in range(3)]
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
            given = [*batch]
            at_once.on_access_many(given)
            assert given == batch, "`on_access_many` changed the caller's list of keys"
            order, other = must_offer(one_by_one, keys), must_offer(at_once, keys)
            if order == must_offer(again, keys) == must_offer(one_by_one, keys) and order != other:
                at = next(at for at, pair in enumerate(itertools.zip_longest(order, other)) if pair[0] != pair[1])
                pytest.fail(f"`on_access_many` of {len(batch)} keys must equal single calls: victim {at} differs")

    def test_a_client_cannot_have_all_that_it_stores_kept(self, make_policy: MakePolicy) -> None:
        """Half of a full L1 should be kept, while others store twice as much as it holds."""
        left = []
        for kept in (False, True):
            policy, mine, others = make_policy(), fresh_keys(60), fresh_keys(300)
            inside = {*mine, *others[:60]}
            policy.on_inserts(others[:60], [MIB] * 60, range(60), _facts("", 0.0, held=60))
            facts = _facts("keep" if kept else "", 0.0, objects=60, held=120)
            policy.on_inserts(mine, [MIB] * 60, range(60), facts)
            for index, key in enumerate(others[60:]):
                victim = next(policy.victims())
                policy.on_removes([victim], "evicted")
                policy.on_inserts([key], [MIB], [0], _facts("", index / 100, held=120))
                inside = inside - {victim} | {key}
            left.append(sum(key in inside for key in mine))
        without, hinted = left
        assert hinted <= without + 40, f"The policy keeps {hinted} of 60 hinted objects: limit hints"

    def test_it_behaves_like_a_set(self, make_policy: MakePolicy) -> None:
        class Machine(_Machine):
            make = staticmethod(make_policy)

        self.must_behave(Machine, examples=self.examples, steps=30)

    def test_any_thread_may_call(self, policy: EvictionPolicy) -> None:
        keys, walks = fresh_keys(6), []

        def leave_a_walk() -> None:
            walk = policy.victims()
            next(walk)
            walks.append(walk)

        for step in (
            lambda: insert(policy, keys),
            lambda: [policy.on_access(key) for key in keys],
            leave_a_walk,
            lambda: policy.on_access_many(keys),
            lambda: policy.on_remove(keys[0]),
            lambda: must_offer(policy, keys[1:]),
        ):
            self.in_threads(step, within_s=10.0)
        must_offer(policy, keys[1:])

    def test_a_call_of_a_large_policy_is_as_quick(self, make_policy: MakePolicy) -> None:
        """The shortest of several calls counts, and a difference of some ten microseconds does not."""
        few = _seconds(make_policy(), _TIMED_FEW)
        waits = [f"{call}: {1e3 * taken:.1f} ms" for call, taken in few.items() if taken > _LONG_S * load()]
        assert not waits, f"The policy's calls must not block each other: {'; '.join(waits)}"
        for size in _TIMED_MANY:
            many = _seconds(make_policy(), size)
            slow = [
                f"{call}: {1e6 * few[call]:.0f} us with {_TIMED_FEW} objects, {1e6 * many[call]:.0f} us with {size}"
                for call in _CALLS
                if many[call] > 8 * few[call] + _SLACK_S
            ]
            assert not slow, "; ".join(slow)

    @pytest.mark.parametrize("leaves", ["evicted", "dropped"])
    @pytest.mark.parametrize("uses", [0, 1, 2, 5])
    def test_what_has_left_is_forgotten(self, policy: EvictionPolicy, uses: int, leaves: str) -> None:

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
        grown = self.grown(come_and_go, _TIMES, self.remembered_keys + 1000)
        assert grown < _TIMES * 16, (
            f"The policy keeps {grown} bytes of {_TIMES} objects that were inserted, used {uses} times and removed"
        )

    def test_requests_and_walks_are_not_kept_one_by_one(self, policy: EvictionPolicy) -> None:
        keys, numbers = fresh_keys(100), count()
        insert(policy, keys)

        def use(index: int) -> None:
            policy.on_access(keys[index % 100])
            facts = RequestFacts(use="lookup", at=float(index), request_id=f"request {next(numbers)}")
            policy.on_uses(keys[index % 90 :][:3], facts)
            list(islice(policy.victims(), 2))

        grown = self.grown(use, _TIMES, 4000)
        assert grown < _TIMES * 16, f"The policy keeps {grown} bytes of {_TIMES} requests of 100 objects"
        must_offer(policy, keys)

    def test_an_object_may_be_used_very_often(self, policy: EvictionPolicy) -> None:
        keys = fresh_keys(3)
        insert(policy, keys)
        for _ in range(_USES // 1000):
            policy.on_access_many(keys[:1] * 1000)
        must_offer(policy, keys)
