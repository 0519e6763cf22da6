"""What `lru` and `two_queues` do with hints: what is done leaves first, what is kept last, and no hint pins L1. What
hints are worth, through the server's object table: made conversations, and a trace in KVFRAMEWORK_TRACE."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_eviction import Lru, TwoQueues
from kvf_eviction.hinted import LONGEST_S, MOST_DUE, SHARE, TICK_S, Hinted
from kvframework.api.eviction import EvictionPolicy, Hint, RequestFacts
from kvframework.api.keys import MAX_DURATION_S, PACKED_KEY_BYTES, PackedKey, Retain
from kvframework.storage.l1.entries import ALIGNMENT, StoredObject
from kvframework.storage.l1.eviction_statistics import Cause
from kvframework.storage.l1.leases import PromptPart
from kvframework.storage.l1.objects import ObjectTable

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


PREFIX = bytes(PACKED_KEY_BYTES - 32)
TOKENS = 512
Trace = Sequence[Sequence[int]]
Hints = Sequence[tuple[Retain, ...]]


def replayed(policy: EvictionPolicy, trace: Trace, room: int, hints: Hints | None = None) -> float:
    """The share of blocks that LOOKUPs find as prefixes, in percent: LOOKUP, RETRIEVE, STORE of all in two parts."""
    ghosts: dict[PackedKey, Cause] = {}
    hits = total = 0
    now = 0.0

    class Remembering(ObjectTable):
        def on_removed(self, stored: StoredObject, cause: Cause, by: PackedKey | None) -> None:
            ghosts[stored.key] = cause

        def was_done(self, key: PackedKey) -> bool:
            return ghosts.get(key) is Cause.HINTED

    table = Remembering(policy, nbytes=room * ALIGNMENT, clock=lambda: now)
    for number, (blocks, said) in enumerate(zip(trace, hints or repeat(()), strict=False)):
        now, request = float(number + 1), f"r{number}"
        table.expire()
        digests = [block.to_bytes(32, "big") for block in blocks]
        row = table.row(PREFIX, digests)
        found = [stored for stored in row[: row.index(None) if None in row else None] if stored is not None]
        hits, total = hits + len(found), total + len(digests)
        part = PromptPart(range(len(found)), TOKENS, said)
        leases = [
            table.pin_objects(found[:], owner=1, request_id=request, use=use, prompt=part)
            for use in ("lookup", "retrieve")
        ]
        for first, end in (0, len(digests) // 2), (len(digests) // 2, len(digests)):
            items = [(PREFIX + digest, ALIGNMENT) for digest in digests[first:end]]
            part = PromptPart(range(first, end), TOKENS, said)
            lease = table.reserve(items, owner=1, request_id=request, prompt=part).lease
            if lease is not None:
                for stored in table.commit(lease.id, owner=1):
                    ghosts.pop(stored.key, None)
        for pins in leases:
            table.unpin(pins.id, owner=1)
    return 100 * hits / total


def ends(trace: Trace) -> list[int]:
    """For each request the blocks of it that are asked for again."""
    last = {block: number for number, blocks in enumerate(trace) for block in blocks}
    return [
        max((at + 1 for at, block in enumerate(blocks) if last[block] > number), default=0)
        for number, blocks in enumerate(trace)
    ]


def said(
    trace: Trace, *, share: float = 0.5, wrong: float = 0.0, form: Literal["range", "request"] = "range", keep: int = 0
) -> Hints:
    """`share` of the clients say where what nobody asks for again begins; of them `wrong` say so of all blocks behind
    the first `keep`. By "request": only of one of which no other block is asked for again."""
    chance = random.Random(1)
    hints: list[tuple[Retain, ...]] = []
    for blocks, used in zip(trace, ends(trace), strict=True):
        says, errs = chance.random() < share, chance.random() < wrong
        if not says or (used == len(blocks) and not errs) or (form == "request" and used > keep and not errs):
            hints.append(())
        elif form == "request":
            hints.append((Retain("done"),))
        else:
            hints.append((Retain("done", start=TOKENS * (keep if errs else used)),))
    return hints


def conversations() -> Trace:
    """On 30 system prompts of four blocks, of up to eight turns each, 150 of them open at a time."""
    chance, fresh = random.Random(2), iter(range(1000, 10**7))
    open_ones: list[tuple[list[int], int]] = []
    trace: list[list[int]] = []
    for _ in range(3000):
        if len(open_ones) < 150:
            system = chance.randrange(30) * 4
            open_ones.append((list(range(system, system + 4)), chance.randint(1, 8)))
        at = chance.randrange(len(open_ones))
        before, turns = open_ones.pop(at)
        blocks = [*before, *(next(fresh) for _ in range(chance.randint(1, 6)))]
        trace.append(blocks)
        if turns > 1:
            open_ones.append((blocks, turns - 1))
    return trace


@BOTH
def test_half_of_the_ends_are_worth_a_good_part_of_what_is_missing(make: Callable[[], EvictionPolicy]) -> None:
    trace = conversations()
    without, all_of_it = (replayed(make(), trace, room) for room in (1500, 100_000))
    by_range = replayed(make(), trace, 1500, said(trace))
    by_request = replayed(make(), trace, 1500, said(trace, form="request", keep=4))
    few_wrong = replayed(make(), trace, 1500, said(trace, wrong=0.1, keep=4))
    figures = f"{without:.1f} %, {by_range:.1f}, {by_request:.1f}, {few_wrong:.1f}, of {all_of_it:.1f}"
    assert by_range > without + 0.3 * (all_of_it - without), figures
    assert by_request > without + 0.1 * (all_of_it - without), figures
    assert few_wrong > without, figures


@BOTH
def test_a_system_prompt_is_not_lost_by_the_requests_that_are_done(make: Callable[[], EvictionPolicy]) -> None:
    """Jobs of one request each, all of which say so, on 60 system prompts; in between, what nobody asks for again."""
    chance, fresh = random.Random(3), iter(range(10_000, 10**7))
    trace, hints = list[list[int]](), list[tuple[Retain, ...]]()
    for number in range(3000):
        system = chance.randrange(60) * 8
        is_job = number % 2 == 0
        trace.append([*range(system, system + 8)] * is_job + [next(fresh) for _ in range(6)])
        hints.append((Retain("done"),) * is_job)
    without, hinted = replayed(make(), trace, 700), replayed(make(), trace, 700, hints)
    assert hinted > without - 1, f"{hinted:.1f} %, without hints {without:.1f} %"


@pytest.mark.skipif("KVFRAMEWORK_TRACE" not in os.environ, reason="Mooncake's conversations in KVFRAMEWORK_TRACE")
@pytest.mark.parametrize(("room", "without", "half"), [(10_000, 21.2, 25.8), (30_000, 32.6, 35.6)])
def test_half_of_the_hints_of_mooncakes_conversations(room: int, without: float, half: float) -> None:
    lines = Path(os.environ["KVFRAMEWORK_TRACE"]).read_text().splitlines()
    trace = [json.loads(line)["hash_ids"] for line in lines]
    assert replayed(Lru(), trace, room) == pytest.approx(without, abs=0.1)
    assert replayed(Lru(), trace, room, said(trace)) > half
