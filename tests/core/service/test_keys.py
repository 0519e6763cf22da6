"""Key resolution: stateless, one way for both forms of content, typed errors for what does not fit. Keys by group: the
hit is the longest that every group's rule allows, found by trying each end. The hit rule against its definition."""

from __future__ import annotations

import array
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_hashers.sha256 import Sha256
from kvframework.api.keys import DIGEST_BYTES, CacheKey, ObjectKey, salt_digest
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.service.key_sets import KeySet
from kvframework.service.keys import KeyResolver, hit_chunks, needed_chunks, prompt_part, window_chunks
from kvframework.storage.l1.leases import PromptPart
from kvframework.wire.messages import KeyGroup

DESC = MemoryLayoutDesc(4, (GroupDesc((2, 1, 4, 8), "float32"), GroupDesc((1, 3, 4, 8), "uint8")))
TOKENS = array.array("I", range(16)).tobytes()


def key(**fields: object) -> CacheKey:
    values: dict[str, object] = {
        "model_name": "m",
        "world_size": 2,
        "worker_id": 1,
        "namespace": b"n" * 16,
        "start": 0,
        "end": 16,
        "request_id": "r",
        "tokens": TOKENS,
        **fields,
    }
    return CacheKey(**values)  # type: ignore[arg-type]


@pytest.fixture
def resolver() -> KeyResolver:
    return KeyResolver(Sha256())


def test_tokens_and_their_digests_name_the_same_objects(resolver: KeyResolver) -> None:
    digests = Sha256().chunk_digests(TOKENS, 4)
    by_tokens = resolver.resolve(key(), DESC)
    by_digests = resolver.resolve(key(tokens=b"", digests=digests), DESC)
    assert by_tokens.flat == by_digests.flat
    assert len(by_tokens.flat) == 4 * 2
    first = ObjectKey.unpack(by_tokens.flat[1])
    assert first == ObjectKey(b"n" * 16, bytes(16), 1, 1, digests[:32])


def test_start_selects_and_keeps_the_prefix_in_the_digests(resolver: KeyResolver) -> None:
    assert resolver.resolve(key(start=8), DESC).flat == resolver.resolve(key(), DESC).flat[4:]


def test_without_worker_id_all_ranks_are_named(resolver: KeyResolver) -> None:
    rows = resolver.resolve(key(worker_id=None), DESC).by_row()
    assert list(rows) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert rows[1, 0] == resolver.resolve(key(), DESC).by_row()[1, 0]


def test_a_salt_separates(resolver: KeyResolver) -> None:
    salted = resolver.resolve(key(cache_salt="tenant"), DESC).flat
    assert not set(salted) & set(resolver.resolve(key(), DESC).flat)
    assert ObjectKey.unpack(salted[0]).salt == salt_digest("tenant")


def test_an_order_of_layers_separates_its_rank_only() -> None:
    orders = {b"n" * 16: {1: bytes(range(16))}}
    ordered = KeyResolver(Sha256(), lambda namespace: orders.get(namespace, {}))
    plain = KeyResolver(Sha256())
    for salt in ("", "tenant"):
        rows, others = (each.resolve(key(worker_id=None, cache_salt=salt), DESC).by_row() for each in (ordered, plain))
        assert rows[0, 0] == others[0, 0]
        assert not set(rows[1, 0]) & set(others[1, 0])
        assert rows[1, 1] == ordered.resolve(key(cache_salt=salt), DESC).by_row()[1, 1]


def test_sizes_follow_the_layer_groups(resolver: KeyResolver) -> None:
    assert [size for _, size in resolver.resolve(key(), DESC).sized()[:3]] == [256, 96, 256]


def test_the_place_in_the_prompt_counts_chunks_from_its_beginning(resolver: KeyResolver) -> None:
    """Two layer groups make two objects a chunk."""
    whole, part = key(), key(start=8)
    grid = resolver.resolve(whole, DESC)
    assert prompt_part(whole, grid, range(len(grid.flat))) == PromptPart([0, 0, 1, 1, 2, 2, 3, 3], 4)
    grid = resolver.resolve(part, DESC)
    assert prompt_part(part, grid, [0, 3]) == PromptPart([2, 3], 4)


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


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[list[bool]], list[int]]:
    chunks = draw(st.integers(1, 8))
    rows = draw(st.integers(1, 4))
    windows = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    row = st.lists(st.booleans(), min_size=chunks, max_size=chunks)
    return draw(st.lists(row, min_size=rows, max_size=rows)), windows


@given(grids())
def test_longest_end_at_which_every_row_holds(grid: tuple[list[list[bool]], list[int]]) -> None:
    rows, windows = grid

    def holds(end: int) -> bool:
        return all(
            row[chunk]
            for row, window in zip(rows, windows, strict=True)
            for chunk in range(max(end - window, 0) if window else 0, end)
        )

    assert hit_chunks(rows, windows) == max(end for end in range(len(rows[0]) + 1) if holds(end))


def test_needed_is_all_for_full_attention_and_the_tail_for_a_window() -> None:
    assert list(needed_chunks(4, 0)) == [0, 1, 2, 3]
    assert list(needed_chunks(4, 2)) == [2, 3]
    assert list(needed_chunks(1, 2)) == [0]


def test_a_window_is_rounded_up_to_chunks() -> None:
    assert [window_chunks(window, 256) for window in (0, 1, 256, 257)] == [0, 1, 1, 2]
