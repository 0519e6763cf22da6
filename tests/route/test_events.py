"""Batches as publishers write them: vLLM's own structs in both forms, and what is none of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvf_route import events as route_events
from kvf_route import prefix_hashes
from kvf_route.events import Malformed, Removed, Skipped, Stored
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
