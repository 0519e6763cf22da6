"""The scheduler side of the connector as a state machine: what is matched and loaded, and what is let go of."""

from __future__ import annotations

from collections import Counter

import pytest

from kvf_vllm.scheduler import DECIDED_S
from kvf_vllm.search import MISS_HOLDS_S, TICKET_HOLDS_S
from kvf_vllm.step_messages import StepReport
from tests.vllm.stand_ins import (
    WINDOWED,
    Clock,
    FakeRequest,
    FakeServer,
    computed,
    filled,
    scene,
    scheduler,
    table,
)


@pytest.mark.parametrize(("load", "whole"), [("async", 16), ("sync", 8)])
def test_a_whole_prompt_is_loaded_only_between_steps(load: str, whole: int) -> None:
    server = FakeServer()
    filled(server, list(range(16)))
    side = scheduler(server, load=load)
    assert side.matched_tokens(FakeRequest("a", list(range(16))), 0) == (whole, load == "async")


def test_with_a_window_the_last_chunk_of_a_whole_prompt_is_computed() -> None:
    server = FakeServer()
    filled(server, list(range(16)))
    side = scheduler(server, groups=WINDOWED)
    assert side.matched_tokens(FakeRequest("a", list(range(16))), 0) == (8, True)


def test_local_blocks_that_end_inside_a_chunk_are_left_out_of_the_load() -> None:
    server, side, request = scene(32, held=32)
    # Three blocks are vLLM's own: one and a half chunks.
    assert side.matched_tokens(request, 12) == (20, True)
    assert server.asked == [(8, 32)]
    side.allocated(request, table(32), 20)
    (load,) = side.plan_step({}, lambda _request_id: None).loads
    assert (load.start, load.end, load.skip, load.block_ids) == (8, 32, 4, [[102, 103, 104, 105, 106, 107]])


def test_a_prefetch_is_awaited_up_to_the_deadline() -> None:
    server, clock = FakeServer(), Clock()
    filled(server, list(range(16)))
    server.pending = 1 << 30
    side = scheduler(server, clock=clock, lookup_deadline_s=1.0)
    request = FakeRequest("a", list(range(16)))
    assert side.matched_tokens(request, 0) == (None, False)
    for _ in range(5):
        assert side.matched_tokens(request, 0) == (None, False)
    assert server.polls == 0, "no more than one question in two milliseconds"
    clock.now += 0.5
    assert side.matched_tokens(request, 0) == (None, False)
    assert server.polls == 1
    clock.now += 0.6
    assert side.matched_tokens(request, 0) == (0, False)
    assert not server.tickets
    assert len(server.asked) == 1


def test_a_prefetch_that_ends_in_time_is_a_hit() -> None:
    server, clock = FakeServer(), Clock()
    filled(server, list(range(16)))
    server.pending = 2
    side = scheduler(server, clock=clock)
    request = FakeRequest("a", list(range(16)))
    answers = []
    for _ in range(3):
        answers.append(side.matched_tokens(request, 0))
        clock.now += 0.01
    assert answers == [(None, False), (None, False), (16, True)]


def test_only_an_idle_engine_waits_for_l2_and_once_a_step() -> None:
    server = FakeServer()
    side = scheduler(server)
    first, second, third = (FakeRequest(name, [number] * 17) for number, name in enumerate("abc", 1))
    server.pending = 1 << 30
    assert side.matched_tokens(first, 0) == (None, False)
    assert side.matched_tokens(second, 0) == (None, False)
    assert server.waits == [DECIDED_S, 0.0], "a slow tier holds up a step once"
    side.plan_step({}, lambda _request_id: None)
    side.matched_tokens(third, 0)
    assert server.waits[2:] == [DECIDED_S]
    server.pending = 0
    running, later, last = (FakeRequest(name, [number] * 17) for number, name in enumerate("xyz", 5))
    side.plan_step({}, lambda _request_id: None)
    side.matched_tokens(running, 0)
    side.allocated(running, table(17), 0)
    side.matched_tokens(later, 0)
    computed(side, running, 17)
    side.matched_tokens(last, 0)
    assert server.waits[3:] == [DECIDED_S, 0.0, 0.0], "what is computed is held up by nobody's lookup"
    side.finished(running)
    side.matched_tokens(FakeRequest("next", [9] * 17), 0)
    assert server.waits[6:] == [DECIDED_S]


def test_a_request_without_room_keeps_its_hit_and_does_not_ask_at_every_step() -> None:
    server, clock = FakeServer(), Clock()
    filled(server, list(range(16)))
    side = scheduler(server, clock=clock)
    hit, miss = FakeRequest("a", list(range(16))), FakeRequest("b", list(range(50, 66)))
    for _ in range(10):
        assert side.matched_tokens(hit, 0) == (16, True)
        assert side.matched_tokens(miss, 0) == (0, False)
        clock.now += MISS_HOLDS_S / 20
    assert len(server.asked) == 2
    clock.now += TICKET_HOLDS_S
    side.matched_tokens(hit, 0)
    side.matched_tokens(miss, 0)
    assert len(server.asked) == 4
    assert len(server.tickets) == 1


def test_what_vllm_finds_itself_later_ends_the_ticket() -> None:
    server, side, request = scene(16, held=16)
    side.matched_tokens(request, 0)
    assert server.tickets
    assert side.matched_tokens(request, 16) == (0, False)
    side.allocated(request, table(16), 0)
    assert not server.tickets


@pytest.mark.parametrize("moment", ["asked", "allocated", "planned", "loaded"])
def test_a_request_that_ends_leaves_no_ticket(moment: str) -> None:
    server, side, request = scene(16, held=16)
    side.matched_tokens(request, 0)
    if moment != "asked":
        side.allocated(request, table(16), 16)
    if moment in ("planned", "loaded"):
        assert side.plan_step({}, lambda _request_id: None).loads
    if moment == "loaded":
        side.heard(StepReport(loaded=Counter({"a": 1})))
    side.finished(request)
    assert not server.tickets
    # vLLM keeps the blocks of a load until its end is told, so a load that was promised is made.
    assert bool(side.plan_step({}, lambda _request_id: None).loads) is (moment == "allocated")
    side.heard(StepReport(loaded=Counter({"a": 1}), failed={"a"}, unstored={"a": 0}))


def test_a_ticket_outlives_the_load_of_the_slowest_worker() -> None:
    server, side, request = scene(16, held=16, workers=2)
    side.matched_tokens(request, 0)
    side.allocated(request, table(16), 16)
    side.plan_step({}, lambda _request_id: None)
    side.heard(StepReport(loaded=Counter({"a": 1})))
    assert server.tickets
    side.heard(StepReport(loaded=Counter({"a": 1})))
    assert not server.tickets


def test_a_failed_load_is_not_tried_again() -> None:
    server, side, request = scene(16, held=16)
    side.matched_tokens(request, 0)
    side.allocated(request, table(16), 16)
    side.plan_step({}, lambda _request_id: None)
    side.heard(StepReport(loaded=Counter({"a": 1}), failed={"a"}))
    assert side.matched_tokens(request, 0) == (0, False)
    assert not server.tickets
    assert [(op.start, op.end) for op in computed(side, request, 16).stores] == [(0, 16)], "the server lacks it"


def test_a_local_hit_that_has_grown_is_asked_about_anew() -> None:
    server, side, request = scene(24, held=24)
    assert side.matched_tokens(request, 0) == (24, True)
    assert side.matched_tokens(request, 8) == (16, True)
    assert server.asked == [(0, 24), (8, 24)]
    assert len(server.tickets) == 1
