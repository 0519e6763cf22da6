"""Keys by group: the hit is the longest that every group's rule allows, found by trying each end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.keys import DIGEST_BYTES
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.service.key_sets import KeySet
from kvframework.wire.messages import KeyGroup

UNIT = 8


@st.composite
def sets(draw: st.DrawFn) -> tuple[KeySet, list[bool]]:
    """Keys of some groups up to an end, and which of their objects exist."""
    start = draw(st.integers(0, 3)) * 32
    end = start + draw(st.integers(1, 12)) * UNIT
    groups = []
    for index in range(draw(st.integers(1, 3))):
        tokens = draw(st.sampled_from([8, 16, 32]))
        first = start // tokens
        count = max(-(-end // tokens) - first, 1)
        window = draw(st.sampled_from([0, tokens, 2 * tokens, 24]))
        packed = b"".join(bytes([index, chunk]).ljust(DIGEST_BYTES, b"\0") for chunk in range(count))
        groups.append(KeyGroup(packed, tokens, first, window, aligned=draw(st.booleans())))
    desc = MemoryLayoutDesc(UNIT, tuple(GroupDesc((4096 + index,), "uint8") for index in range(len(groups))))
    made = KeySet(desc, [bytes([index]) for index in range(len(groups))], groups, start, end)
    return made, draw(st.lists(st.booleans(), min_size=len(made.flat), max_size=len(made.flat)))


def needed(keys: KeySet, row: int, end: int) -> range:
    """The chunks of the prompt that a hit up to `end` needs of a group, by its rule."""
    group = keys.groups[row]
    begin = max(end - group.window, keys.start) if group.window else keys.start
    return range(begin // group.tokens, math.ceil(end / group.tokens))


def best(keys: KeySet, exists: Sequence[bool]) -> int:
    there = {keys.flat[index] for index, each in enumerate(exists) if each}
    for end in range(keys.end, keys.start, -UNIT):
        if any(group.aligned and end % group.tokens for group in keys.groups):
            continue
        wanted = [
            keys.prefixes[row] + keys.rows[row][chunk - group.first]
            for row, group in enumerate(keys.groups)
            for chunk in needed(keys, row, end)
        ]
        if there.issuperset(wanted):
            return (end - keys.start) // UNIT
    return 0


@given(sets())
def test_the_hit_is_the_longest_that_every_rule_allows(drawn: tuple[KeySet, list[bool]]) -> None:
    keys, exists = drawn
    expected = best(keys, exists)
    assert keys.hit(exists) == expected
    there = {keys.flat[index]: index for index, each in enumerate(exists) if each}

    def row_of(prefix: bytes, digests: Sequence[bytes]) -> list[int | None]:
        # Places count from 1: an object is true.
        return [None if (at := there.get(prefix + each)) is None else at + 1 for each in digests]

    hit, objects = keys.find(row_of)
    assert hit == expected
    assert [each - 1 for each in objects] == keys.needed(hit)
    assert keys.nbytes(hit) == sum(map(keys.nbytes_of, keys.needed(hit)))
    missing = keys.first_missing(row_of, hit)
    assert (missing is None) <= (hit == keys.chunks or any(group.aligned for group in keys.groups))
    if missing is not None:
        assert missing[1] not in there


@given(sets(), st.integers(0, 12))
def test_a_cut_hit_is_no_longer_than_the_cut(drawn: tuple[KeySet, list[bool]], most: int) -> None:
    keys, exists = drawn
    assert keys.hit(exists, most) <= min(most, keys.hit(exists))


@given(sets())
def test_places_and_sizes_are_those_of_the_rows(drawn: tuple[KeySet, list[bool]]) -> None:
    keys, _ = drawn
    places = [(chunk, row) for row, digests in enumerate(keys.rows) for chunk in range(len(digests))]
    assert [keys.place(index) for index in range(len(keys.flat))] == places
    assert keys.sized() == [(key, 4096 + row) for key, (_, row) in zip(keys.flat, places, strict=True)]
