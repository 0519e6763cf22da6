"""The set of keys against a set; and that it takes as many keys as it promises."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvf_route.table import ABSENT, Table

KEYS = st.lists(st.integers(1, 40).map(lambda small: small * 0x9E3779B97F4A7C15 % (1 << 64)), max_size=12)


@given(st.lists(st.tuples(st.booleans(), KEYS), max_size=12))
def test_it_is_a_set(steps: list[tuple[bool, list[int]]]) -> None:
    table, model = Table(100), set[int]()
    for adds, keys in steps:
        asked = np.array(keys, np.uint64)
        if adds:
            slots, new = table.add(asked)
            assert (slots != ABSENT).all()
            assert new.tolist() == [key not in model for key in keys]
            assert len(set(slots.tolist())) == len(set(keys))
            model |= set(keys)
        else:
            slots = np.unique(table.find(asked))
            table.discard(slots[slots != ABSENT])
            model -= set(keys)
        known = np.array(sorted(model), np.uint64)
        assert (table.find(known) != ABSENT).all()
        assert ((table.find(asked) != ABSENT) == [key in model for key in keys]).all()


def test_it_takes_the_keys_that_it_has_room_for_and_says_what_it_refuses() -> None:
    keys = np.random.default_rng(1).integers(1, 1 << 63, 200_000, dtype=np.uint64) * np.uint64(2)
    table = Table(100_000)
    first, _ = table.add(keys[:100_000])
    assert (first == ABSENT).sum() < 100_000 * 0.0001
    more, new = table.add(keys[100_000:])
    assert (new == (more != ABSENT)).all()
    assert (more == ABSENT).any()
    assert len(np.unique(more[more != ABSENT])) == (more != ABSENT).sum()
    kept = keys[:100_000][first != ABSENT]
    assert (table.find(kept) != ABSENT).all()


def test_keys_that_all_want_the_same_two_buckets_are_refused_beyond_their_slots() -> None:
    # Equal high parts of both halves: the same buckets.
    keys = np.arange(1, 101, dtype=np.uint64)
    slots, _ = Table(1_000_000).add(keys)
    assert (slots != ABSENT).sum() in (8, 16)
