"""Batches as publishers write them: vLLM's own structs in both forms, and what is none of them. Scores of several nodes
against a count block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvf_hashers import Sha256
from kvf_route import events as route_events
from kvf_route import prefix_hashes, scoring
from kvf_route.contents import Place
from kvf_route.events import TIERS, Malformed, Removed, Skipped, Stored
from kvf_route.index import Flags, Index, Keys
from kvframework.client.hashing import RequestHashes
from tests.route.publisher import CLEARED, as_array, batch, removed, stored

EVENT = stored([1, 2], None, range(8))


def read(*events: Any) -> list[route_events.Event]:
    return list(route_events.decoded(batch(*events)).events)


def test_the_structs_of_vllm() -> None:
    # As the structs of vLLM 0.32 are encoded, `vllm/distributed/kv_events.py`.
    first = stored([-1, b"x" * 32], 7, [1, 2, 3, 4], size=2, medium="GPU", group_idx=0)
    payload = batch(first, removed([2**63 - 1], None), CLEARED, at=1.5, rank=3)
    found = route_events.decoded(payload)
    first, second, third = found.events
    assert isinstance(first, Stored)
    assert first.externals == [2**64 - 1, prefix_hashes.short(b"x" * 32)]
    assert (first.parent, first.block_tokens, first.tier, first.group) == (7, 2, "gpu", 0)
    assert first.tokens == prefix_hashes.packed([1, 2, 3, 4])
    assert second == Removed([2**63 - 1], "gpu", None)
    assert third == route_events.Cleared()
    assert found.rank == 3


def test_arrays_say_the_same_as_maps() -> None:
    salted = stored([1, 2], None, range(8), extra_keys=[["l", "dynamo-cache-salt:s"], None], lora_name="l")
    events = [EVENT, salted, removed([1]), {"type": "AllBlocksCleared"}]
    assert read(*map(as_array, events[:2]), ["BlockRemoved", [1], "CPU"], ["AllBlocksCleared"]) == read(*events)


def test_the_shortest_array_of_the_oldest_publishers() -> None:
    (event,) = read(["BlockStored", [1], None, [5, 6], 2, None])
    assert isinstance(event, Stored)
    assert (event.tier, event.adapter) == ("gpu", "")


@pytest.mark.parametrize(
    ("medium", "tier"),
    [(None, "gpu"), ("GPU", "gpu"), ("CPU", "cpu"), ("CPU_PINNED", "cpu"), ("STORAGE", "storage"), ("DISK", "storage")],
)
def test_media_are_tiers(medium: str | None, tier: str) -> None:
    assert read(removed([1], medium)) == [Removed([1], tier, None)]


def names(event: route_events.Event, parent: bytes = b"p" * 8) -> list[bytes]:
    assert isinstance(event, Stored), event
    return prefix_hashes.chained(parent, event.tokens, event.block_tokens, event.extras)


def test_a_salt_is_the_same_in_each_spelling_and_counts_once_a_prompt() -> None:
    plain = names(read(EVENT)[0])
    spelled = [
        names(each)
        for each in read(
            stored([1, 2], None, range(8), extra_keys=[["s"], None]),
            stored([1, 2], None, range(8), extra_keys=[["dynamo-cache-salt:s"], None]),
            stored([1, 2], None, range(8), cache_salt="s"),
            stored([1, 2], None, range(8), cache_salt="s", extra_keys=[["s"], None]),
        )
    ]
    assert spelled == [spelled[0]] * 4
    assert not set(spelled[0]) & set(plain)
    # Behind a parent the salt is in the parent's name.
    middle = stored([1, 2], 9, range(8), cache_salt="s", extra_keys=[["dynamo-cache-salt:s"], None])
    assert names(read(middle)[0]) == plain


def test_what_else_makes_the_kv_is_in_the_names_from_there_on() -> None:
    plain = names(read(EVENT)[0])
    image = names(read(stored([1, 2], None, range(8), extra_keys=[None, [["image", 3]]]))[0])
    assert image[0] == plain[0]
    assert image[1] != plain[1]


def test_an_adapter_is_its_name_and_without_one_its_number() -> None:
    found = read(stored([1], None, range(4), lora_name="a"), stored([1], None, range(4), lora_id=3))
    assert [each.adapter for each in found if isinstance(each, Stored)] == ["a", "#3"]


@pytest.mark.parametrize(
    "event",
    [
        stored([1], None, range(4), kv_cache_spec_kind="sliding_window", group_idx=1),
        stored([1], None, range(4), locality="REMOTE"),
        {**removed([1]), "locality": "REMOTE"},
        {"type": "BlockMoved", "to": 1},
    ],
)
def test_what_a_request_cannot_find_there_is_skipped(event: dict[str, Any]) -> None:
    assert read(event) == [Skipped()]


@pytest.mark.parametrize(
    "event",
    [
        7,
        None,
        [],
        {},
        ["BlockStored"],
        {"type": "BlockStored"},
        stored([1], None, range(5)),
        stored([1], None, range(4), size=0),
        stored([1], None, range(4), size=-4),
        stored([1], None, [], size=1 << 40),
        stored([1], None, [-1, 0, 0, 0]),
        stored([1], None, [1 << 32, 0, 0, 0]),
        stored([1.5], None, range(4)),  # type: ignore[list-item]
        stored([b"x" * 5000], None, range(4)),
        stored([1], None, range(4), lora_name="l" * 5000),
        stored([1], None, range(4), extra_keys=[None, None]),
        stored([1], None, range(4), extra_keys=7),
        removed("12"),  # type: ignore[arg-type]
    ],
)
def test_a_malformed_event_costs_no_other(event: Any) -> None:
    before, odd, after = read(EVENT, event, EVENT)
    assert isinstance(odd, Malformed)
    assert before == after == read(EVENT)[0]


@given(st.binary(max_size=200))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x91" * 100_000)
@example(b"\x93\x00" + b"\x91" * 100_000)
@example(batch(stored([1], None, range(4)) | {"extra_keys": None})[:-1])
def test_no_bytes_are_fatal(payload: bytes) -> None:
    found = route_events.decoded(payload)
    assert all(isinstance(each, (Stored, Removed, route_events.Cleared, Skipped, Malformed)) for each in found.events)


@pytest.mark.parametrize(
    "event",
    [
        stored(range(route_events.MOST_BLOCKS + 1), None, range(route_events.MOST_BLOCKS + 1), size=1),
        stored([1], None, [0] * (route_events.MOST_TOKENS + 1)),
        stored([1], None, range(4), extra_keys=[["key"] * (route_events.MOST_KEYS + 1)]),
        stored([1], None, range(4), extra_keys=[[[[]] * route_events.LONGEST_KEY]]),
        removed([1] * (route_events.MOST_REMOVED + 1)),
    ],
    ids=["blocks", "tokens", "keys", "key", "removed"],
)
def test_what_is_too_long_is_a_mistake(event: dict[str, Any]) -> None:
    odd, after = read(event, EVENT)
    assert isinstance(odd, Malformed)
    assert "length" in odd.why
    assert isinstance(after, Stored)


def test_a_batch_of_too_many_events_is_one_mistake() -> None:
    (odd,) = read(*[0] * (route_events.MOST_EVENTS + 1))
    assert isinstance(odd, Malformed)


def test_a_long_event_is_several_that_continue_each_other() -> None:
    count = 2 * route_events.AT_ONCE + 5
    parts = read(
        stored(
            range(count), 77, range(2 * count), size=2, extra_keys=[None] * (route_events.AT_ONCE + 1) + [[["x", 1]]]
        )
    )
    assert all(isinstance(each, Stored) and len(each.externals) <= route_events.AT_ONCE for each in parts)
    stores = [each for each in parts if isinstance(each, Stored)]
    assert [name for each in stores for name in each.externals] == list(range(count))
    assert b"".join(each.tokens for each in stores) == prefix_hashes.packed(range(2 * count))
    assert [each.parent for each in stores] == [77, route_events.AT_ONCE - 1, 2 * route_events.AT_ONCE - 1]
    assert [list(each.extras) for each in stores] == [[], [1], []]


def test_depth_is_no_danger() -> None:
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    event = msgspec.msgpack.encode(stored([1], None, range(4), extra_keys=[None])).replace(
        b"\xaaextra_keys\x91\xc0", b"\xaaextra_keys\x91" + msgspec.msgpack.encode([deep] * 1)
    )
    payload = b"\x93\x00\x91" + event + b"\x00"
    (found,) = route_events.decoded(payload).events
    assert isinstance(found, (Stored, Malformed))


SIZE = 4
BLOCKS = 90  # more than the first spans
TOKENS = prefix_hashes.packed(range(SIZE * BLOCKS))
OWNS = prefix_hashes.as_keys(prefix_hashes.chained(prefix_hashes.root(), TOKENS, SIZE))

# By node: places, each a tier and the first blocks it has but for one.
LEFT_OUT = st.integers(0, BLOCKS)
PLACES = st.lists(st.tuples(st.sampled_from(TIERS), st.integers(0, BLOCKS), LEFT_OUT), max_size=3)


def whole(made: scoring.Scoring) -> dict[str, scoring.Score]:
    *steps, scores = made
    assert set(steps) <= {None}
    return scores


@given(st.lists(PLACES, max_size=5))
def test_scores(nodes: list[list[tuple[str, int, int]]]) -> None:
    index = Index(5000)
    places: dict[str, list[Place]] = {}
    expected: dict[str, dict[str, int]] = {}
    for number, told in enumerate(nodes):
        held: list[tuple[str, set[int]]] = []
        for tier, end, left_out in told:
            place = index.open()
            blocks = [each for each in range(end) if each != left_out]
            index.store(place, np.array(blocks, np.uint64), OWNS[blocks])
            places.setdefault(f"n{number}", []).append(Place(place, b"", 0, SIZE, tier, None))
            held.append((tier, set(blocks)))
        score: dict[str, int] = {}
        for block in range(BLOCKS):
            tiers = [tier for tier, blocks in held if block in blocks]
            if not tiers:
                break
            best = min(tiers, key=TIERS.index)
            score[best] = score.get(best, 0) + SIZE
        places.setdefault(f"n{number}", [])
        expected[f"n{number}"] = score
    assert whole(scoring.by_tokens(index, places, TOKENS)) == expected


def test_of_several_sizes_of_blocks_the_best_counts() -> None:
    index = Index(5000)
    tokens = prefix_hashes.packed(range(64))
    places = []
    for size, tier, blocks in ((4, "gpu", 3), (32, "cpu", 2)):
        place = index.open()
        owns = prefix_hashes.as_keys(prefix_hashes.chained(prefix_hashes.root(), tokens, size))[:blocks]
        index.store(place, np.arange(blocks, dtype=np.uint64), owns)
        places.append(Place(place, b"", 0, size, tier, None))
    assert whole(scoring.by_tokens(index, {"a": places}, tokens)) == {"a": {"cpu": 64}}


def test_digests_find_the_chunks_whose_last_block_is_told() -> None:
    hashes = RequestHashes(Sha256(), 8, request_id="r")
    hashes.extend(list(range(32)))
    digests = hashes.digests(32)
    index = Index(100)
    place = index.open()
    named = [scoring.last_block(digests[at : at + 32], "m", "s", "") for at in range(0, 96, 32)]
    index.store(place, np.array(named, np.uint64), np.arange(1, 4, dtype=np.uint64))
    nodes = {"a": [Place(place, b"", 0, 4, "storage", "m")]}
    assert whole(scoring.by_digests(index, nodes, digests, 8, model="m", salt="s")) == {"a": {"storage": 24}}
    assert whole(scoring.by_digests(index, nodes, digests, 8, model="m", salt="t")) == {"a": {}}
    assert whole(scoring.by_digests(index, nodes, b"", 8, model="m")) == {"a": {}}


def test_what_many_nodes_have_is_looked_for_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(20_000)
    asked: list[int] = []
    holds = index.holds

    def counted(places: Sequence[int], keys: Keys) -> Flags:
        asked.append(len(places) * len(keys))
        return holds(places, keys)

    monkeypatch.setattr(index, "holds", counted)
    monkeypatch.setattr(scoring, "_STEP", 200)
    nodes = {}
    for number in range(100):
        place = index.open()
        index.store(place, np.arange(BLOCKS, dtype=np.uint64), OWNS)
        nodes[f"n{number}"] = [Place(place, b"", 0, SIZE, "cpu", None)]
    assert whole(scoring.by_tokens(index, nodes, TOKENS)) == {node: {"cpu": SIZE * BLOCKS} for node in nodes}
    assert max(asked) <= 200
    assert sum(asked) == 100 * BLOCKS
