"""What cache-aware routers hear: what is stored, under which salt and images, and what is seen to be gone."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

import kvf_vllm.events as events
from kvf_events.chunks import verified
from kvf_hashers.sha256 import Sha256
from kvf_vllm.events import Announcements, BlocksRemoved, BlocksStored
from kvf_vllm.requests import Wish
from kvf_vllm.scheduler import SchedulerSide
from kvf_vllm.step_messages import AdapterNews, StepPlan, StepReport
from kvframework.api.keys import Image
from tests.vllm.stand_ins import BLOCK, CHUNK, FakeRequest, FakeServer, scheduler

TOKENS = list(range(20))
LORA = SimpleNamespace(lora_name="style", lora_int_id=1, lora_path="/x")
LORA_LOADED = StepReport(adapters={0: {1: AdapterNews("style", "/x", "content")}})


def announcing(*, telling: bool = False, **options: Any) -> tuple[FakeServer, SchedulerSide]:
    server = FakeServer()
    server.telling = telling
    return server, scheduler(server, event_block_size=BLOCK, **options)


def stored(side: SchedulerSide, request: FakeRequest, *, server: FakeServer | None = None, by: int = 1) -> StepPlan:
    """Computes all of a request; `by` of its two workers store it."""
    if not request.num_computed_tokens:
        side.matched_tokens(request, 0)
    tokens = request.num_tokens - request.num_computed_tokens
    plan = side.plan_step({request.request_id: tokens}, lambda _request_id: [list(range(1, 9))])
    request.num_computed_tokens += tokens
    for op in plan.stores:
        report = StepReport()
        report.ended[op.number], report.stored[op.number] = 2, by
        side.heard(report)
        if server is not None:
            server.stored(op)
    return plan


def test_blocks_are_announced_when_all_workers_have_stored_them() -> None:
    server, side = announcing(workers=2)
    request = FakeRequest("a", list(TOKENS))
    stored(side, request, by=1)
    assert side.events.take() == []
    request = FakeRequest("b", list(TOKENS))
    stored(side, request, server=server, by=2)
    assert side.events.take() == [BlocksStored(request.block_hashes[:4], None, TOKENS[:16], BLOCK)]
    request.all_token_ids += range(20, 24)
    stored(side, request, server=server, by=2)
    hashes = request.block_hashes
    assert side.events.take() == [BlocksStored(hashes[4:6], hashes[3], list(range(16, 24)), BLOCK)]
    assert side.events.take() == []


def test_what_a_lookup_misses_is_gone() -> None:
    server, side = announcing()
    request = FakeRequest("a", list(TOKENS))
    (op,) = stored(side, request, server=server).stores
    side.events.take()
    server.known = {each for each in server.known if each[1] == op.digests[:32]}
    # Another prompt says nothing about this one.
    side.matched_tokens(FakeRequest("other", list(range(50, 70))), 0)
    assert side.events.take() == []
    # Nor does a server that gives no answer.
    server.silent = True
    assert side.matched_tokens(FakeRequest("late", list(TOKENS)), 0) == (0, False)
    assert side.events.take() == []
    server.silent = False
    side.matched_tokens(FakeRequest("b", list(TOKENS)), 0)
    assert side.events.take() == [BlocksRemoved(request.block_hashes[2:4])]
    side.matched_tokens(FakeRequest("c", list(TOKENS)), 0)
    assert side.events.take() == []


def test_after_a_reset_everything_is_gone() -> None:
    side = scheduler(FakeServer(), event_block_size=BLOCK)
    request = FakeRequest("a", list(TOKENS))
    stored(side, request)
    side.events.take()
    side.reset()
    assert side.events.take() == [BlocksRemoved(request.block_hashes[:4])]


def test_what_was_announced_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_ANNOUNCED", 2)
    announcements = Announcements(BLOCK)
    request = FakeRequest("a", list(range(12)))
    event = announcements.of(request, Wish(), 0, 12)
    announcements.stored(event)
    announcements.take()
    announcements.looked_up(request, Wish(), 0, 12)
    assert announcements.take() == [BlocksRemoved(request.block_hashes[1:])]
    assert announcements.of(request, Wish(), 0, 16) is None


SALTED: list[dict[str, Any]] = [
    {"cache_salt": "tenant"},
    {"kv_transfer_params": {"kvframework.salt": "own"}},
    {"cache_salt": "tenant", "kv_transfer_params": {"kvframework.salt": "own"}},
]


@pytest.mark.parametrize(("fields", "wanted"), [*((fields, BLOCK) for fields in SALTED), ({}, 0)])
def test_salted_blocks_are_not_announced_nor_any_that_nobody_wants(fields: dict[str, Any], wanted: int) -> None:
    side = scheduler(FakeServer(), event_block_size=wanted)
    stored(side, FakeRequest("a", list(TOKENS), **fields))
    side.reset()
    assert side.events.take() == []


def test_with_the_option_the_salt_stands_in_both_spellings_of_every_event() -> None:
    server, side = announcing(announce_salts=True)
    request = FakeRequest("a", list(TOKENS), cache_salt="tenant")
    stored(side, request, server=server)
    request.all_token_ids += range(20, 24)
    stored(side, request, server=server)
    events = side.events.take()
    assert [(event.salt, event.extra_keys) for event in events if isinstance(event, BlocksStored)] == [
        ("tenant", [("dynamo-cache-salt:tenant",), None, None, None]),
        ("tenant", [("dynamo-cache-salt:tenant",), None]),
    ]
    # What Dynamo's own front end has tagged is not tagged twice.
    tagged = FakeRequest("b", list(range(50, 70)), cache_salt="dynamo-cache-salt:tenant")
    stored(side, tagged, server=server)
    (event,) = side.events.take()
    assert (event.salt, event.extra_keys[0]) == ("tenant", ("dynamo-cache-salt:tenant",))
    # vLLM's hashes do not know this salt: whatever the event said, it would be taken for the tenant's other blocks.
    stored(side, FakeRequest("c", list(TOKENS), **SALTED[2]), server=server)
    stored(side, FakeRequest("d", list(TOKENS), **SALTED[1]), server=server)
    assert side.events.take() == []


def test_what_a_salted_lookup_misses_says_nothing_of_the_plain_blocks() -> None:
    server, side = announcing()
    stored(side, FakeRequest("a", list(TOKENS)), server=server)
    side.events.take()
    side.matched_tokens(FakeRequest("b", list(TOKENS), **SALTED[1]), 0)
    assert side.events.take() == []


def test_salted_blocks_are_removed_only_if_they_were_announced() -> None:
    server, side = announcing(announce_salts=True)
    request = FakeRequest("a", list(TOKENS), cache_salt="tenant")
    stored(side, request, server=server)
    side.events.take()
    server.known.clear()
    side.matched_tokens(FakeRequest("b", list(TOKENS)), 0)
    assert side.events.take() == []
    side.matched_tokens(FakeRequest("c", list(TOKENS), cache_salt="tenant"), 0)
    assert side.events.take() == [BlocksRemoved(request.block_hashes[:4])]


def test_images_are_named_in_the_blocks_that_they_reach() -> None:
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=3, length=6))
    request = FakeRequest("a", list(range(16)), mm_features=[image])
    event = Announcements(BLOCK).of(request, Wish(), 0, 16)
    assert event.extra_keys == [(("cat", 3),), (("cat", -1),), (("cat", -5),), None]
    later = Announcements(BLOCK).of(request, Wish(), 12, 16)
    assert later.extra_keys == ()


def test_requests_with_adapters_are_not_announced() -> None:
    server, side = announcing(announce_salts=True)
    side.heard(LORA_LOADED)
    stored(side, FakeRequest("a", list(TOKENS), lora_request=LORA), server=server)
    assert server.known
    assert side.events.take() == []


def test_a_store_that_ends_after_a_reset_is_not_announced() -> None:
    side = scheduler(FakeServer(), event_block_size=BLOCK)
    request = FakeRequest("a", list(TOKENS))
    side.matched_tokens(request, 0)
    side.plan_step({"a": 20}, lambda _request_id: [list(range(1, 6))])
    side.reset()
    report = StepReport()
    report.ended[0] = report.stored[0] = 1
    side.heard(report)
    assert side.events.take() == []


def test_what_the_server_tells_the_engine_leaves_out_and_gives_the_server() -> None:
    server, side = announcing(telling=True)
    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=3, length=6))
    request = FakeRequest("a", list(TOKENS), mm_features=[image])
    (store,) = stored(side, request, server=server, by=2).stores
    assert side.events.take() == []
    content = store.content
    assert content.problem(store.end - store.start, CHUNK) == ""
    assert verified(content, store.digests, store.start, CHUNK, Sha256())
    assert content.images == (Image("cat", 3, 6),)
    hashes = struct.unpack(f"<{store.end // BLOCK}Q", content.hashes)
    assert hashes == tuple(int.from_bytes(each, "big") & ((1 << 64) - 1) for each in request.block_hashes[:4])
    # A load names what an earlier life of the server, or a tier, has.
    side.matched_tokens(again := FakeRequest("b", list(TOKENS), mm_features=[image]), 0)
    side.allocated(again, [list(range(20, 29))], 16)
    (load,) = side.plan_step({}, lambda _request_id: None).loads
    assert load.content == content


def test_of_a_salt_that_the_server_withholds_the_engine_decides() -> None:
    server, side = announcing(telling=True, announce_salts=True)
    (store,) = stored(side, FakeRequest("a", list(TOKENS), cache_salt="tenant"), server=server, by=2).stores
    assert store.content is None
    assert len(side.events.take()) == 1


def test_an_adapter_is_named_and_its_content_verified() -> None:
    server, side = announcing(telling=True)
    side.heard(LORA_LOADED)
    (store,) = stored(side, FakeRequest("a", list(TOKENS), lora_request=LORA), server=server, by=2).stores
    assert (store.content.lora_name, store.content.hashes) == ("style", b"")
    assert verified(store.content, store.digests, store.start, CHUNK, Sha256())
