"""What `lru` and `two_queues` do with hints: what is done leaves first, what is kept last, and no hint pins L1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_eviction import Lru, TwoQueues
from kvf_eviction.hinted import LONGEST_S, MOST_DUE, SHARE, TICK_S, Hinted
from kvframework.api.eviction import EvictionPolicy, Hint, RequestFacts
from kvframework.api.keys import MAX_DURATION_S

MIB = 1 << 20
Make = Callable[[], EvictionPolicy]
BOTH = pytest.mark.parametrize("make", [Lru, TwoQueues])


def keys_of(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(72, "big") for number in range(first, first + count)]


def facts(
    hint: Hint = "",
    at: float = 0.0,
    keep_s: float = 60.0,
    priority: int = 50,
    request: str = "",
    sizes: Sequence[int] = (),
    held: int = 0,
) -> RequestFacts:
    kept = {"keep_s": keep_s, "priority": priority, "sizes": sizes} if hint == "keep" else {}
    return RequestFacts(use="store", at=at, request_id=request, hint=hint, held=held, **kept)  # type: ignore[arg-type]


def insert(policy: EvictionPolicy, keys: list[bytes], told: RequestFacts) -> None:
    policy.on_inserts(keys, [1] * len(keys), [-1] * len(keys), told)


@BOTH
def test_done_leaves_first_and_kept_last(make: Make) -> None:
    policy = make()
    old, kept, done, new = (keys_of(100 * number, 4) for number in range(4))
    insert(policy, old, facts())
    insert(policy, keys_of(900, 20), facts())
    insert(policy, kept, facts("keep"))
    insert(policy, done, facts("done"))
    insert(policy, new, facts())
    order = list(policy.victims())
    assert (order[:4], order[-4:]) == (done, kept)
    policy.on_removes(done + kept[:1], "evicted")
    assert list(policy.victims())[:1] != done[:1]
    assert set(policy.victims()) == {*old, *kept[1:], *new, *keys_of(900, 20)}


@BOTH
def test_the_last_word_counts(make: Make) -> None:
    policy = make()
    insert(policy, keys_of(900, 20), facts())
    (key,) = keys_of(1, 1)
    insert(policy, [key], facts())
    for hint, place in (("keep", -1), ("done", 0), ("keep", -1), ("done", 0)):
        policy.on_uses([key], facts(hint))  # type: ignore[arg-type]
        assert list(policy.victims())[place] == key
    policy.on_uses([key], facts(request="other"))
    assert next(policy.victims()) != key, "somebody asked again"


@BOTH
def test_what_is_kept_is_given_back_after_its_time_which_each_hint_sets_anew(make: Make) -> None:
    policy = make()
    rest = keys_of(900, 20)
    kept, again = keys_of(0, 2)
    insert(policy, rest, facts())
    insert(policy, [kept, again], facts("keep", keep_s=60.0))
    policy.on_uses([again], facts("keep", at=50.0, keep_s=60.0))
    policy.on_uses([kept, again], facts(at=55.0))
    assert list(policy.victims())[-2:] == [kept, again]
    policy.on_uses(rest[:1], facts(at=60.0 + TICK_S))
    assert list(policy.victims())[-1:] == [again]
    policy.on_uses(rest, facts(at=110.0 + TICK_S))
    policy.on_uses(rest, facts(at=110.0 + TICK_S, request="later"))
    assert next(policy.victims()) in (kept, again), "older than all others by now"


@BOTH
def test_hints_keep_a_share_at_most_and_an_hour_at_most(make: Make) -> None:
    """An attacker asks for all of its objects to be kept for ever, again and again, by every way there is."""
    policy = make()
    others, mine = keys_of(0, 300), keys_of(1000, 300)
    insert(policy, others, facts())
    for _ in range(3):
        for key in mine:
            told = facts("keep", keep_s=1e300, priority=1 << 40, sizes=[MIB], held=len(list(policy.victims())) * MIB)
            if key in set(policy.victims()):
                policy.on_uses([key], facts("done"))
                policy.on_uses([key], told)
            else:
                insert(policy, [key], told)
    policy.on_uses(others[:1], facts(held=600 * MIB))
    next(policy.victims())  # L1 is full
    policy.on_uses(others[:1], facts(held=600 * MIB))
    order = list(policy.victims())
    assert len(order) == 600
    kept = [key for key in order[-150:] if key in mine]
    assert len(kept) == SHARE * 600
    policy.on_uses(others, facts(at=1.0, held=600 * MIB))
    assert set(list(policy.victims())[:150]) == set(mine) - set(kept), "the rest of the attacker's objects is older"
    for _ in range(len(kept) // MOST_DUE + 1):
        policy.on_uses(others[:1], facts(at=LONGEST_S + 2 * TICK_S))
    policy.on_uses(others, facts(at=LONGEST_S + 3 * TICK_S, request="later"))
    assert set(list(policy.victims())[:300]) == set(mine)


@BOTH
def test_a_higher_priority_is_kept_longer(make: Make) -> None:
    policy = make()
    insert(policy, keys_of(900, 40), facts())
    low, high, middle = (keys_of(100 * number, 2) for number in range(3))
    insert(policy, low, facts("keep", priority=1))
    insert(policy, high, facts("keep", priority=100))
    insert(policy, middle, facts("keep", priority=50))
    assert list(policy.victims())[-6:] == [*low, *middle, *high]


def test_the_bounds_of_the_wire_are_those_of_the_policies() -> None:
    assert MAX_DURATION_S == LONGEST_S


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "use", "remove"]),
        st.sets(st.integers(0, 11), min_size=1),
        st.sampled_from(["", "done", "keep"]),
        st.floats(0, 100),
        st.floats(0, 200),
        st.integers(0, 100),
    ),
    max_size=40,
)


@BOTH
@given(actions=ACTIONS)
def test_whatever_is_said_all_that_is_in_is_offered_once(make: Make, actions: list[tuple]) -> None:  # type: ignore[type-arg]
    policy, inside, done, now = make(), set[bytes](), list[bytes](), 0.0
    for what, numbers, hint, passed, keep_s, priority in actions:
        now += passed
        chosen = [number.to_bytes(72, "big") for number in sorted(numbers)]
        told = RequestFacts(use="lookup", at=now, request_id="", hint=hint, keep_s=keep_s, priority=priority)
        here = [key for key in chosen if (key in inside) == (what != "insert")]
        if what == "insert":
            insert(policy, here, told)
            inside.update(here)
        elif what == "use":
            policy.on_uses(here, told)
        else:
            policy.on_removes(here, "evicted")
            inside.difference_update(here)
        done = [key for key in done if key not in here]
        done += here if hint == "done" and what != "remove" else []
        order = list(policy.victims())
        assert sorted(order) == sorted(inside)
        assert order[: len(done)] == done


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 20), st.floats(0, 5000), st.floats(0, 9000), st.integers(0, 100)), max_size=60
    )
)
def test_nothing_is_kept_beyond_its_time_and_nothing_given_back_before(
    steps: list[tuple[int, float, float, int]],
) -> None:
    hinted, until, now = Hinted(), dict[bytes, float](), 0.0
    for number, passed, keep_s, priority in steps:
        now += passed
        for key, mark in hinted.due(facts(at=now)):
            assert mark == key[-1] + 1
            assert until.pop(key) <= now
        assert all(end > now - TICK_S for end in until.values())
        key = number.to_bytes(72, "big")
        hinted.take(key)
        hinted.add_kept(
            key, 1, number + 1, RequestFacts(use="store", at=now, hint="keep", keep_s=keep_s, priority=priority)
        )
        until[key] = now + min(keep_s, LONGEST_S)
        assert hinted.kept.keys() == until.keys()
        assert sorted(hinted.last()) == sorted(until)


def test_a_crowd_whose_time_has_passed_comes_back_in_parts() -> None:
    hinted = Hinted()
    for key in keys_of(0, 3 * MOST_DUE):
        hinted.add_kept(key, 1, 1, facts("keep", keep_s=1.0))
    assert [len(hinted.due(facts(at=100.0))) for _ in range(4)] == [MOST_DUE, MOST_DUE, MOST_DUE, 0]


def test_what_was_kept_before_l1_was_full_comes_back_beyond_the_share() -> None:
    hinted = Hinted()
    low, high = keys_of(0, 300), keys_of(1000, 300)
    for keys, priority in (high, 90), (low, 10):
        for key in keys:
            assert hinted.may_keep(key, 10)
            hinted.add_kept(key, 10, 1, facts("keep", priority=priority))
    told = facts(at=1.0, held=10_000)
    assert hinted.due(told) == []
    hinted.full()
    assert [key for key, _ in hinted.due(told)] == [*low, *high[:50]]
    assert (hinted.due(told), len(hinted.kept), hinted.kept_bytes) == ([], 250, 2500)
    assert (hinted.may_keep(low[0], 1), hinted.may_keep(high[-1], 10)) == (False, True)
    for key in high[50:]:
        hinted.take(key)
    assert hinted.kept_bytes == 0
    assert (hinted.may_keep(low[0], 2500), hinted.may_keep(low[0], 2501)) == (True, False)
