"""What cache-aware routers are told: what is stored, and what is seen to be gone."""

from __future__ import annotations

import pytest

import kvf_vllm.events as events
from kvf_vllm.events import Announcements, BlocksRemoved, BlocksStored
from kvf_vllm.scheduler import SchedulerSide
from kvf_vllm.steps import StepReport
from tests.vllm.stand_ins import BLOCK, FakeRequest, FakeServer, scheduler

TOKENS = list(range(20))


def stored(side: SchedulerSide, request: FakeRequest, *, server: FakeServer | None = None, by: int = 1) -> None:
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


def test_blocks_are_announced_when_all_workers_have_stored_them() -> None:
    server = FakeServer()
    side = scheduler(server, workers=2, event_block_size=BLOCK)
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
    server = FakeServer()
    side = scheduler(server, event_block_size=BLOCK)
    request = FakeRequest("a", list(TOKENS))
    side.matched_tokens(request, 0)
    (op,) = side.plan_step({"a": 20}, lambda _request_id: [list(range(1, 6))]).stores
    report = StepReport()
    report.ended[0] = report.stored[0] = 1
    side.heard(report)
    side.events.take()
    server.stored(op)
    server.known = {each for each in server.known if each[1] == op.digests[:32]}
    # Another prompt says nothing about this one.
    side.matched_tokens(FakeRequest("other", list(range(50, 70))), 0)
    assert side.events.take() == []
    side.matched_tokens(FakeRequest("b", list(TOKENS)), 0)
    assert side.events.take() == [BlocksRemoved(request.block_hashes[2:4])]
    side.matched_tokens(FakeRequest("c", list(TOKENS)), 0)
    assert side.events.take() == []


def test_after_a_reset_everything_is_gone() -> None:
    side = scheduler(FakeServer(), event_block_size=BLOCK)
    request = FakeRequest("a", list(TOKENS))
    side.matched_tokens(request, 0)
    side.plan_step({"a": 20}, lambda _request_id: [list(range(1, 6))])
    report = StepReport()
    report.ended[0] = report.stored[0] = 1
    side.heard(report)
    side.events.take()
    side.reset()
    assert side.events.take() == [BlocksRemoved(request.block_hashes[:4])]


def test_nobody_wants_events() -> None:
    side = scheduler(FakeServer())
    stored(side, FakeRequest("a", list(TOKENS)))
    side.reset()
    assert side.events.take() == []


def test_what_was_announced_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_ANNOUNCED", 2)
    announcements = Announcements(BLOCK)
    hashes = [bytes([index]) for index in range(3)]
    event = announcements.of(hashes, list(range(12)), 0, 12)
    assert event is not None
    announcements.stored(event)
    announcements.take()
    announcements.looked_up(hashes, 0, 12)
    assert announcements.take() == [BlocksRemoved(hashes[1:])]
    assert announcements.of(hashes, list(range(12)), 0, 16) is None
