"""The scheduler side of the connector as a state machine: what is matched, loaded and stored, and what is let go of."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvf_vllm.layouts import GroupFacts
from kvf_vllm.scheduler import SchedulerSide
from kvf_vllm.search import MISS_HOLDS_S, TICKET_HOLDS_S
from kvf_vllm.steps import Served, StepPlan, StepReport
from kvframework.api import NO_BLOCK
from tests.vllm.stand_ins import BLOCK, CHUNK, SERVED, Clock, FakeRequest, FakeServer, scheduler

WINDOWED = (GroupFacts(("full",), BLOCK), GroupFacts(("window",), BLOCK, window=6))


def table(tokens: int, first: int = 100) -> list[list[int]]:
    return [list(range(first, first + -(-tokens // BLOCK)))]


def computed(side: SchedulerSide, request: FakeRequest, tokens: int, blocks: list[list[int]] | None = None) -> StepPlan:
    """One step that computes `tokens` of a request."""
    held = blocks if blocks is not None else table(request.num_computed_tokens + tokens)
    plan = side.plan_step({request.request_id: tokens}, lambda _request_id: held)
    request.num_computed_tokens += tokens
    return plan


def filled(server: FakeServer, tokens: list[int], **fields: Any) -> None:
    """What another engine of the same model has stored."""
    side = scheduler(server)
    request = FakeRequest("other", tokens, **fields)
    side.matched_tokens(request, 0)
    for op in computed(side, request, len(tokens)).stores:
        server.stored(op)
    side.finished(request)
    server.asked.clear()


def test_a_prompt_is_stored_chunk_by_chunk_and_found_again() -> None:
    server = FakeServer()
    side = scheduler(server)
    request = FakeRequest("a", list(range(30)))
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, table(30), 0)
    first = computed(side, request, 20)
    assert [(op.start, op.end, op.block_ids) for op in first.stores] == [(0, 16, [[100, 101, 102, 103]])]
    second = computed(side, request, 10)
    assert [(op.start, op.end, op.block_ids) for op in second.stores] == [(16, 24, [[104, 105]])]
    for op in (*first.stores, *second.stores):
        server.stored(op)
    again = FakeRequest("b", list(range(30)))
    assert side.matched_tokens(again, 0) == (24, True)
    side.allocated(again, table(24, 200), 24)
    (load,) = side.plan_step({}, lambda _request_id: None).loads
    assert (load.request_id, load.start, load.end, load.skip) == ("b", 0, 24, 0)
    assert load.block_ids == [[200, 201, 202, 203, 204, 205]]
    assert server.tickets
    side.heard(StepReport(loaded={"b": 1}))
    assert not server.tickets


def test_what_was_generated_is_stored_as_chunks_fill() -> None:
    server = FakeServer()
    side = scheduler(server)
    request = FakeRequest("a", list(range(6)))
    side.matched_tokens(request, 0)
    assert not computed(side, request, 6).stores
    for token in (6, 7, 8):
        request.all_token_ids.append(token)
        plan = computed(side, request, 1)
        assert [(op.start, op.end) for op in plan.stores] == ([(0, 8)] if token == 7 else [])


def test_drafted_tokens_are_not_stored() -> None:
    server = FakeServer()
    side = scheduler(server)
    request = FakeRequest("a", list(range(6)))
    side.matched_tokens(request, 0)
    # Two known tokens are missing to a chunk; a step that also computes five drafts must not fill it.
    assert not computed(side, request, 11, table(11)).stores


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
    server = FakeServer()
    filled(server, list(range(32)))
    side = scheduler(server)
    request = FakeRequest("a", list(range(32)))
    # Three blocks are vLLM's own: one and a half chunks.
    assert side.matched_tokens(request, 12) == (20, True)
    assert server.asked == [(8, 32)]
    side.allocated(request, table(32), 20)
    (load,) = side.plan_step({}, lambda _request_id: None).loads
    assert (load.start, load.end, load.skip, load.block_ids) == (8, 32, 4, [[102, 103, 104, 105, 106, 107]])


def test_blocks_that_a_window_gave_away_are_marked() -> None:
    server = FakeServer()
    side = scheduler(server, groups=WINDOWED)
    request = FakeRequest("a", list(range(16)))
    side.matched_tokens(request, 0)
    plan = computed(side, request, 16, [[7, 8, 9, 10], [0, 0, 5, 6]])
    assert [op.block_ids for op in plan.stores] == [[[7, 8, 9, 10], [NO_BLOCK, NO_BLOCK, 5, 6]]]


def test_a_missing_block_of_full_attention_is_never_stored() -> None:
    server = FakeServer()
    side = scheduler(server)
    request = FakeRequest("a", list(range(16)))
    side.matched_tokens(request, 0)
    assert not computed(side, request, 16, [[7, 0, 9, 10]]).stores
    assert side.tally.counts["unstorable_chunks"] == 1


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
    server = FakeServer()
    filled(server, list(range(16)))
    side = scheduler(server)
    request = FakeRequest("a", list(range(16)))
    side.matched_tokens(request, 0)
    assert server.tickets
    assert side.matched_tokens(request, 16) == (0, False)
    side.allocated(request, table(16), 0)
    assert not server.tickets


@pytest.mark.parametrize("moment", ["asked", "allocated", "planned", "loaded"])
def test_a_request_that_ends_leaves_no_ticket(moment: str) -> None:
    server = FakeServer()
    filled(server, list(range(16)))
    side = scheduler(server)
    request = FakeRequest("a", list(range(16)))
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
    server = FakeServer()
    filled(server, list(range(16)))
    side = scheduler(server, workers=2)
    request = FakeRequest("a", list(range(16)))
    side.matched_tokens(request, 0)
    side.allocated(request, table(16), 16)
    side.plan_step({}, lambda _request_id: None)
    side.heard(StepReport(loaded=Counter({"a": 1})))
    assert server.tickets
    side.heard(StepReport(loaded=Counter({"a": 1})))
    assert not server.tickets


def test_a_failed_load_is_not_tried_again() -> None:
    server = FakeServer()
    filled(server, list(range(16)))
    side = scheduler(server)
    request = FakeRequest("a", list(range(16)))
    side.matched_tokens(request, 0)
    side.allocated(request, table(16), 16)
    side.plan_step({}, lambda _request_id: None)
    side.heard(StepReport(loaded=Counter({"a": 1}), failed={"a"}))
    assert side.matched_tokens(request, 0) == (0, False)
    assert not server.tickets
    assert [(op.start, op.end) for op in computed(side, request, 16).stores] == [(0, 16)], "the server lacks it"


def test_what_was_not_sent_is_stored_later() -> None:
    server = FakeServer()
    side = scheduler(server)
    request = FakeRequest("a", list(range(24)))
    side.matched_tokens(request, 0)
    assert computed(side, request, 16).stores
    side.heard(StepReport(unstored={"a": 0}))
    assert [(op.start, op.end) for op in computed(side, request, 8).stores] == [(0, 24)]


def test_stores_end_before_their_blocks_are_written() -> None:
    server = FakeServer()
    filled(server, list(range(50, 66)))
    side = scheduler(server)
    request = FakeRequest("a", list(range(16)))
    side.matched_tokens(request, 0)
    (store,) = computed(side, request, 16, [[1, 2, 3, 4]]).stores
    side.finished(request)
    assert side.plan_step({}, lambda _request_id: None, {5, 6}).fence == []
    assert side.plan_step({}, lambda _request_id: None, {4, 5}).fence == [store.number]
    # A load writes too, but not the blocks that it leaves out.
    loading = FakeRequest("b", list(range(50, 66)))
    assert side.matched_tokens(loading, 4) == (12, True)
    side.allocated(loading, [[4, 11, 12, 13]], 12)
    assert side.plan_step({}, lambda _request_id: None).fence == []
    other = FakeRequest("c", list(range(50, 66)))
    assert side.matched_tokens(other, 4) == (12, True)
    side.allocated(other, [[20, 3, 21, 22]], 12)
    assert side.plan_step({}, lambda _request_id: None).fence == [store.number]
    side.heard(StepReport(ended=Counter({store.number: 1})))
    assert side.plan_step({}, lambda _request_id: None, {1, 2, 3, 4}).fence == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lora_request": object()}, "lora"),
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"pooling_params": object()}, "pooling"),
        ({"resumable": True}, "streaming_input"),
        ({"kv_transfer_params": {"kvframework.laod": False}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"kvframework.load": "no"}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"kvframework.load": False, "kvframework.store": False}}, "opted_out"),
    ],
)
def test_requests_that_are_left_out(fields: dict[str, Any], reason: str) -> None:
    server = FakeServer()
    filled(server, list(range(16)))
    side = scheduler(server)
    request = FakeRequest("a", list(range(16)), **fields)
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, table(16), 0)
    assert not computed(side, request, 16).stores
    assert not server.asked
    assert dict(side.tally.counts) == {f"miss_requests|{reason}": 1}


def test_opting_out_of_one_direction_only() -> None:
    server = FakeServer()
    filled(server, list(range(16)))
    side = scheduler(server)
    only_stores = FakeRequest("a", list(range(16)), kv_transfer_params={"kvframework.load": False})
    assert side.matched_tokens(only_stores, 0) == (0, False)
    assert computed(side, only_stores, 16).stores
    only_loads = FakeRequest("b", list(range(16)), kv_transfer_params={"kvframework.store": False})
    assert side.matched_tokens(only_loads, 0) == (16, True)
    assert not computed(side, only_loads, 16).stores


def test_log_probabilities_of_the_prompt_need_it_computed() -> None:
    server = FakeServer()
    filled(server, list(range(16)))
    side = scheduler(server)
    request = FakeRequest("a", list(range(16)), skip_reading_prefix_cache=True)
    assert side.matched_tokens(request, 0) == (0, False)
    assert computed(side, request, 16).stores


def test_salts_keep_requests_apart() -> None:
    server = FakeServer()
    filled(server, list(range(16)), cache_salt="tenant")
    side = scheduler(server)
    same = {"cache_salt": "tenant"}
    by_parameter = {"kv_transfer_params": {"kvframework.salt": "tenant"}}
    both = {"cache_salt": "tenant", "kv_transfer_params": {"kvframework.salt": "more"}}
    found = {
        name: side.matched_tokens(FakeRequest(name, list(range(16)), **fields), 0)[0]
        for name, fields in {"none": {}, "same": same, "by parameter": by_parameter, "both": both}.items()
    }
    assert found == {"none": 0, "same": 16, "by parameter": 16, "both": 0}


def test_images_are_part_of_what_a_chunk_is_called() -> None:
    def with_image(identifier: str, offset: int) -> dict[str, Any]:
        place = SimpleNamespace(offset=offset, length=3)
        return {"mm_features": [SimpleNamespace(identifier=identifier, mm_position=place)]}

    server = FakeServer()
    filled(server, list(range(24)), **with_image("cat", 9))
    side = scheduler(server)
    found = [
        side.matched_tokens(FakeRequest(str(index), list(range(24)), **fields), 0)[0]
        for index, fields in enumerate([with_image("cat", 9), with_image("dog", 9), with_image("cat", 10), {}])
    ]
    assert found == [24, 8, 8, 8]


def test_nothing_is_found_after_a_reset() -> None:
    server = FakeServer()
    filled(server, list(range(16)))
    side = scheduler(server)
    running = FakeRequest("running", list(range(80, 96)))
    side.matched_tokens(running, 0)
    side.reset()
    assert not computed(side, running, 16).stores, "its KV may be of both kinds"
    request = FakeRequest("a", list(range(16)))
    assert side.matched_tokens(request, 0) == (0, False)
    for op in computed(side, request, 16).stores:
        server.stored(op)
    assert side.matched_tokens(FakeRequest("b", list(range(16))), 0) == (16, True)
    assert scheduler(server).matched_tokens(FakeRequest("c", list(range(16))), 0) == (16, True)


def test_before_the_workers_have_spoken_requests_wait_a_moment() -> None:
    server, clock = FakeServer(), Clock()
    filled(server, list(range(16)))
    side = SchedulerSide(server, WINDOWED[:1], scheduler(server)._options, workers=2, clock=clock)
    request = FakeRequest("a", list(range(16)))
    assert side.matched_tokens(request, 0) == (None, False)
    side.heard(StepReport(served={0: SERVED}))
    assert side.matched_tokens(request, 0) == (None, False)
    side.heard(StepReport(served={1: SERVED}))
    assert side.matched_tokens(request, 0) == (16, True)
    late = SchedulerSide(server, WINDOWED[:1], side._options, clock=clock)
    assert late.matched_tokens(request, 0) == (None, False)
    clock.now += 10
    assert late.matched_tokens(request, 0) == (0, False)


def test_without_a_server_requests_are_computed_and_found_once_it_is_there() -> None:
    server = FakeServer()
    filled(server, list(range(16)))
    side = scheduler(server)
    side = SchedulerSide(server, WINDOWED[:1], side._options)
    side.heard(StepReport(served={0: None}))
    request = FakeRequest("a", list(range(16)))
    assert side.matched_tokens(request, 0) == (0, False)
    assert not computed(side, request, 16).stores
    side.heard(StepReport(served={0: SERVED}))
    assert side.matched_tokens(FakeRequest("b", list(range(16))), 0) == (16, True)
    server.reachable = False
    assert side.matched_tokens(FakeRequest("c", list(range(16))), 0) == (0, False)


def test_workers_that_disagree_about_names_load_and_store_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    side = SchedulerSide(server, WINDOWED[:1], scheduler(server)._options, workers=2)
    side.heard(StepReport(served={0: SERVED, 1: Served("m", b"x" * 16, CHUNK, 1)}))
    assert "differently" in caplog.text
    assert side.matched_tokens(FakeRequest("a", list(range(16))), 0) == (0, False)


@pytest.mark.parametrize(("role", "does"), [("loads", "stores"), ("stores", "loads")])
def test_a_role_of_one_direction(role: str, does: str) -> None:
    server = FakeServer()
    filled(server, list(range(16)))
    side = scheduler(server, **{role: False})
    request = FakeRequest("a", list(range(16)))
    assert side.matched_tokens(request, 0) == ((16, True) if does == "loads" else (0, False))
    assert bool(computed(side, request, 16).stores) is (does == "stores")


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_course_of_events_stores_from_its_own_blocks_and_pins_nothing_in_the_end(data: st.DataObject) -> None:
    """Requests that share prefixes come, are computed in pieces, preempted, fail to load and end in any order: what is
    stored is what lies in the blocks, and in the end nothing is pinned."""
    server = FakeServer()
    side = scheduler(server, clock=Clock())
    running: dict[str, tuple[FakeRequest, list[list[int]]]] = {}
    number, next_block = 0, 1
    for _ in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from(["new", "step", "step", "preempt", "finish"]))
        if event == "new":
            number += 1
            shared = data.draw(st.integers(0, 30))
            tokens = [*range(shared), *(1000 * number + i for i in range(data.draw(st.integers(1, 20))))]
            request = FakeRequest(f"r{number}", tokens)
            blocks = [list(range(next_block, next_block + 20))]
            next_block += 20
            running[request.request_id] = (request, blocks)
            admit(data, side, request, blocks)
        elif not running:
            continue
        else:
            request, blocks = running[data.draw(st.sampled_from(sorted(running)))]
            if event == "step":
                left = request.num_tokens - request.num_computed_tokens
                if left <= 0:
                    request.all_token_ids.append(data.draw(st.integers(0, 5)))
                    left = 1
                if request.num_tokens > 20 * BLOCK:
                    continue
                plan = computed(side, request, data.draw(st.integers(1, left)), blocks)
                for op in plan.stores:
                    assert op.block_ids == [blocks[0][op.start // BLOCK : op.end // BLOCK]]
                    assert op.end <= request.num_computed_tokens
                    server.stored(op)
                    side.heard(StepReport(ended=Counter({op.number: 1})))
            elif event == "preempt":
                request.num_computed_tokens = 0
                admit(data, side, request, blocks)
            else:
                side.finished(request)
                del running[request.request_id]
    for request, _ in running.values():
        side.finished(request)
    assert not server.tickets
    assert not side._unfinished


def admit(data: st.DataObject, side: SchedulerSide, request: FakeRequest, blocks: list[list[int]]) -> None:
    """vLLM's way with a waiting request: match, allocate, load, and perhaps be told that it failed."""
    local = data.draw(st.integers(0, request.num_tokens // BLOCK)) * BLOCK
    external, between_steps = side.matched_tokens(request, local)
    assert external is not None
    assert external % BLOCK == 0
    assert local + external <= request.num_tokens
    side.allocated(request, blocks, external)
    plan = side.plan_step({}, lambda _request_id: None)
    assert len(plan.loads) == bool(external) == between_steps
    request.num_computed_tokens = local
    if not external:
        return
    (load,) = plan.loads
    assert load.start + load.skip == local
    assert load.end == local + external
    assert load.block_ids == [blocks[0][load.start // BLOCK : load.end // BLOCK]]
    failed = data.draw(st.booleans())
    report = StepReport(loaded=Counter({request.request_id: 1}), failed={request.request_id} if failed else set())
    side.heard(report)
    side.allocated(request, blocks, 0)
    if not failed:
        request.num_computed_tokens = min(load.end, request.num_tokens - 1)


def test_what_vllm_held_itself_is_stored_although_the_rest_was_loaded() -> None:
    server = FakeServer()
    filled(server, list(range(16)))
    side = scheduler(server)
    request = FakeRequest("a", list(range(24)))
    assert side.matched_tokens(request, 8) == (8, True)
    side.allocated(request, table(24), 8)
    side.plan_step({}, lambda _request_id: None)
    side.heard(StepReport(loaded=Counter({"a": 1})))
    request.num_computed_tokens = 16
    assert [(op.start, op.end) for op in computed(side, request, 8).stores] == [(0, 24)]


def test_a_store_is_fenced_until_the_last_worker_has_ended_it() -> None:
    server = FakeServer()
    side = scheduler(server, workers=2)
    request = FakeRequest("a", list(range(8)))
    side.matched_tokens(request, 0)
    (store,) = computed(side, request, 8, [[1, 2]]).stores
    for fence in ([store.number], []):
        side.heard(StepReport(ended=Counter({store.number: 1})))
        assert side.plan_step({}, lambda _request_id: None, {1}).fence == fence


def test_a_local_hit_that_has_grown_is_asked_about_anew() -> None:
    server = FakeServer()
    filled(server, list(range(24)))
    side = scheduler(server)
    request = FakeRequest("a", list(range(24)))
    assert side.matched_tokens(request, 0) == (24, True)
    assert side.matched_tokens(request, 8) == (16, True)
    assert server.asked == [(0, 24), (8, 24)]
    assert len(server.tickets) == 1
