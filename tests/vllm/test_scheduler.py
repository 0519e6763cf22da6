"""The scheduler side of the connector as a state machine: what is matched, loaded, stored and let go of, and which
stores must end before their blocks are written."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvf_vllm.scheduler import DECIDED_S, SchedulerSide
from kvf_vllm.search import MISS_HOLDS_S, TICKET_HOLDS_S
from kvf_vllm.speed import Waiting
from kvf_vllm.step_messages import StepReport
from kvframework.api.layout import NO_BLOCK
from kvframework.pricing import EngineSpeed
from tests.vllm import stand_ins


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (16, True)), ({"load": "sync"}, (8, False)), ({"groups": stand_ins.WINDOWED}, (8, True))],
)
def test_a_whole_prompt_is_loaded_only_between_steps_and_without_windows(
    options: dict[str, Any], expected: tuple[int, bool]
) -> None:
    _, side, request = stand_ins.scene(16, held=16, **options)
    assert side.matched_tokens(request, 0) == expected


def test_a_short_load_is_within_the_step_once_loads_were_copied() -> None:
    _, side, request = stand_ins.scene(20, held=16)
    assert side.matched_tokens(request, 0) == (16, True), "nothing is known yet of how fast loads are"
    side.heard(StepReport(copied_tokens=1000.0, copied_s=0.01))
    assert side.matched_tokens(request, 0) == (16, False)
    side.allocated(request, stand_ins.table(20), 16)
    (load,) = side.plan_step({request.request_id: 4}, lambda _request_id: None).loads
    assert load.is_within


@pytest.mark.parametrize(
    ("tokens", "copied_s", "options"),
    [(20, 100.0, {}), (16, 0.01, {}), (20, 0.01, {"groups": stand_ins.WINDOWED}), (20, 0.01, {"load": "async"})],
    ids=["long", "the whole prompt", "windows", "asked for"],
)
def test_any_other_load_is_between_steps(tokens: int, copied_s: float, options: dict[str, Any]) -> None:
    _, side, request = stand_ins.scene(tokens, held=16, **options)
    side.heard(StepReport(copied_tokens=1000.0, copied_s=copied_s))
    external, between_steps = side.matched_tokens(request, 0)
    assert external
    assert between_steps


def test_local_blocks_that_end_inside_a_chunk_are_left_out_of_the_load() -> None:
    server, side, request = stand_ins.scene(32, held=32)
    # Three blocks are vLLM's own: one and a half chunks.
    assert side.matched_tokens(request, 12) == (20, True)
    assert server.asked == [(8, 32)]
    side.allocated(request, stand_ins.table(32), 20)
    (load,) = side.plan_step({}, lambda _request_id: None).loads
    assert (load.start, load.end, load.skip, load.block_ids) == (8, 32, 4, [[102, 103, 104, 105, 106, 107]])


def test_a_prefetch_is_awaited_up_to_the_deadline() -> None:
    clock = stand_ins.Clock()
    server, side, request = stand_ins.scene(16, held=16, clock=clock, lookup_deadline_s=1.0)
    server.pending = 1 << 30
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
    clock = stand_ins.Clock()
    server, side, request = stand_ins.scene(16, held=16, clock=clock)
    server.pending = 2
    answers = []
    for _ in range(3):
        answers.append(side.matched_tokens(request, 0))
        clock.now += 0.01
    assert answers == [(None, False), (None, False), (16, True)]


def test_only_an_idle_engine_waits_for_l2_and_once_a_step() -> None:
    server = stand_ins.FakeServer()
    side = stand_ins.scheduler(server)
    first, second, third = (stand_ins.FakeRequest(name, [number] * 17) for number, name in enumerate("abc", 1))
    server.pending = 1 << 30
    assert side.matched_tokens(first, 0) == (None, False)
    assert side.matched_tokens(second, 0) == (None, False)
    assert server.waits == [DECIDED_S, 0.0], "a slow tier holds up a step once"
    side.plan_step({}, lambda _request_id: None)
    side.matched_tokens(third, 0)
    assert server.waits[2:] == [DECIDED_S]
    server.pending = 0
    running, later, last = (stand_ins.FakeRequest(name, [number] * 17) for number, name in enumerate("xyz", 5))
    side.plan_step({}, lambda _request_id: None)
    side.matched_tokens(running, 0)
    side.allocated(running, stand_ins.table(17), 0)
    side.matched_tokens(later, 0)
    stand_ins.computed(side, running, 17)
    side.matched_tokens(last, 0)
    assert server.waits[3:] == [DECIDED_S, 0.0, 0.0], "what is computed is held up by nobody's lookup"
    side.finished(running)
    side.matched_tokens(stand_ins.FakeRequest("next", [9] * 17), 0)
    assert server.waits[6:] == [DECIDED_S]


def test_a_request_without_room_keeps_its_hit_and_does_not_ask_at_every_step() -> None:
    clock, miss = stand_ins.Clock(), stand_ins.FakeRequest("b", list(range(50, 66)))
    server, side, hit = stand_ins.scene(16, held=16, clock=clock)
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
    server, side, request = stand_ins.scene(16, held=16)
    side.matched_tokens(request, 0)
    assert server.tickets
    assert side.matched_tokens(request, 16) == (0, False)
    side.allocated(request, stand_ins.table(16), 0)
    assert not server.tickets


@pytest.mark.parametrize("moment", ["asked", "allocated", "planned", "loaded"])
def test_a_request_that_ends_leaves_no_ticket(moment: str) -> None:
    server, side, request = stand_ins.scene(16, held=16)
    side.matched_tokens(request, 0)
    if moment != "asked":
        side.allocated(request, stand_ins.table(16), 16)
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
    server, side, request = stand_ins.scene(16, held=16, workers=2)
    side.matched_tokens(request, 0)
    side.allocated(request, stand_ins.table(16), 16)
    side.plan_step({}, lambda _request_id: None)
    side.heard(StepReport(loaded=Counter({"a": 1})))
    assert server.tickets
    side.heard(StepReport(loaded=Counter({"a": 1})))
    assert not server.tickets


def test_a_failed_load_is_not_tried_again() -> None:
    server, side, request = stand_ins.scene(16, held=16)
    side.matched_tokens(request, 0)
    side.allocated(request, stand_ins.table(16), 16)
    side.plan_step({}, lambda _request_id: None)
    side.heard(StepReport(loaded=Counter({"a": 1}), failed={"a"}))
    assert side.matched_tokens(request, 0) == (0, False)
    assert not server.tickets
    assert [(op.start, op.end) for op in stand_ins.computed(side, request, 16).stores] == [(0, 16)], (
        "the server lacks it"
    )


def test_a_local_hit_that_has_grown_is_asked_about_anew() -> None:
    server, side, request = stand_ins.scene(24, held=24)
    assert side.matched_tokens(request, 0) == (24, True)
    assert side.matched_tokens(request, 8) == (16, True)
    assert server.asked == [(0, 24), (8, 24)]
    assert len(server.tickets) == 1


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_course_of_events_stores_from_its_own_blocks_and_pins_nothing_in_the_end(data: st.DataObject) -> None:
    """Requests that share prefixes come, are computed in pieces, preempted, fail to load and end in any order: what is
    stored is what lies in the blocks, and in the end nothing is pinned."""
    server = stand_ins.FakeServer()
    side = stand_ins.scheduler(server, clock=stand_ins.Clock())
    running: dict[str, tuple[stand_ins.FakeRequest, list[list[int]]]] = {}
    number, next_block = 0, 1
    for _ in range(data.draw(st.integers(1, 25))):
        event = data.draw(st.sampled_from(["new", "step", "step", "preempt", "finish"]))
        if event == "new":
            number += 1
            shared = data.draw(st.integers(0, 30))
            tokens = [*range(shared), *(1000 * number + i for i in range(data.draw(st.integers(1, 20))))]
            request = stand_ins.FakeRequest(f"r{number}", tokens)
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
                if request.num_tokens > 20 * stand_ins.BLOCK:
                    continue
                plan = stand_ins.computed(side, request, data.draw(st.integers(1, left)), blocks)
                for op in plan.stores:
                    assert op.block_ids == [blocks[0][op.start // stand_ins.BLOCK : op.end // stand_ins.BLOCK]]
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


def admit(data: st.DataObject, side: SchedulerSide, request: stand_ins.FakeRequest, blocks: list[list[int]]) -> None:
    """vLLM's way with a waiting request: match, allocate, load, and perhaps be told that it failed."""
    local = data.draw(st.integers(0, request.num_tokens // stand_ins.BLOCK)) * stand_ins.BLOCK
    external, between_steps = side.matched_tokens(request, local)
    assert external % stand_ins.BLOCK == 0
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
    assert load.block_ids == [blocks[0][load.start // stand_ins.BLOCK : load.end // stand_ins.BLOCK]]
    failed = data.draw(st.booleans())
    report = StepReport(loaded=Counter({request.request_id: 1}), failed={request.request_id} if failed else set())
    side.heard(report)
    side.allocated(request, blocks, 0)
    if not failed:
        request.num_computed_tokens = min(load.end, request.num_tokens - 1)


def test_what_was_generated_is_stored_as_chunks_fill() -> None:
    _, side, request = stand_ins.scene(6)
    side.matched_tokens(request, 0)
    assert not stand_ins.computed(side, request, 6).stores
    for token in (6, 7, 8):
        request.all_token_ids.append(token)
        plan = stand_ins.computed(side, request, 1)
        assert [(op.start, op.end) for op in plan.stores] == ([(0, 8)] if token == 7 else [])


def test_drafted_tokens_are_not_stored() -> None:
    _, side, request = stand_ins.scene(6)
    side.matched_tokens(request, 0)
    # Two known tokens are missing to a chunk; a step that also computes five drafts must not fill it.
    assert not stand_ins.computed(side, request, 11, stand_ins.table(11)).stores


def test_blocks_that_a_window_gave_away_are_marked() -> None:
    _, side, request = stand_ins.scene(16, groups=stand_ins.WINDOWED)
    side.matched_tokens(request, 0)
    plan = stand_ins.computed(side, request, 16, [[7, 8, 9, 10], [0, 0, 5, 6]])
    assert [op.block_ids for op in plan.stores] == [[[7, 8, 9, 10], [NO_BLOCK, NO_BLOCK, 5, 6]]]


def test_a_missing_block_of_full_attention_is_never_stored() -> None:
    _, side, request = stand_ins.scene(16)
    side.matched_tokens(request, 0)
    assert not stand_ins.computed(side, request, 16, [[7, 0, 9, 10]]).stores
    assert side.tally.counts["unstorable_chunks"] == 1


def test_what_was_not_sent_is_stored_later() -> None:
    _, side, request = stand_ins.scene(24)
    side.matched_tokens(request, 0)
    assert stand_ins.computed(side, request, 16).stores
    side.heard(StepReport(unstored={"a": 0}))
    assert [(op.start, op.end) for op in stand_ins.computed(side, request, 8).stores] == [(0, 24)]


def test_stores_end_before_their_blocks_are_written() -> None:
    server, side, request = stand_ins.scene(16)
    stand_ins.filled(server, list(range(50, 66)))
    side.matched_tokens(request, 0)
    (store,) = stand_ins.computed(side, request, 16, [[1, 2, 3, 4]]).stores
    side.finished(request)
    assert side.plan_step({}, lambda _request_id: None, {5, 6}).fence == []
    assert side.plan_step({}, lambda _request_id: None, {4, 5}).fence == [store.number]
    # A load writes too, but not the blocks that it leaves out.
    loading = stand_ins.FakeRequest("b", list(range(50, 66)))
    assert side.matched_tokens(loading, 4) == (12, True)
    side.allocated(loading, [[4, 11, 12, 13]], 12)
    assert side.plan_step({}, lambda _request_id: None).fence == []
    other = stand_ins.FakeRequest("c", list(range(50, 66)))
    assert side.matched_tokens(other, 4) == (12, True)
    side.allocated(other, [[20, 3, 21, 22]], 12)
    assert side.plan_step({}, lambda _request_id: None).fence == [store.number]
    side.heard(StepReport(ended=Counter({store.number: 1})))
    assert side.plan_step({}, lambda _request_id: None, {1, 2, 3, 4}).fence == []


def test_stores_end_before_another_connector_loads_into_their_blocks() -> None:
    """vLLM's MultiConnector tells the others the blocks, too; of a load between steps the step itself says nothing."""
    _, side, request = stand_ins.scene(16)
    side.matched_tokens(request, 0)
    (store,) = stand_ins.computed(side, request, 16, [[1, 2, 3, 4]]).stores
    side.finished(request)
    for name, table_, fence in (("b", [4, 11, 12, 13], []), ("c", [20, 3, 21, 22], [store.number])):
        foreign = stand_ins.FakeRequest(name, list(range(50, 66)))
        assert side.matched_tokens(foreign, 4) == (0, False)
        side.allocated(foreign, [table_], 0)
        assert side.plan_step({}, lambda _request_id: None).fence == fence
    assert side.plan_step({}, lambda _request_id: None).fence == []


@pytest.mark.parametrize(("held", "stored"), [(0, (16, 24)), (8, (0, 24))])
def test_what_follows_a_load_is_stored_at_once_and_with_it_what_vllm_held_itself(
    held: int, stored: tuple[int, int]
) -> None:
    _, side, request = stand_ins.scene(24, held=16)
    assert side.matched_tokens(request, held) == (16 - held, True)
    side.allocated(request, stand_ins.table(24), 16 - held)
    side.plan_step({}, lambda _request_id: None)
    side.heard(StepReport(loaded=Counter({"a": 1})))
    side.allocated(request, stand_ins.table(24), 0)
    request.num_computed_tokens = 16
    assert [(op.start, op.end) for op in stand_ins.computed(side, request, 8).stores] == [stored]


def test_a_store_is_fenced_until_the_last_worker_has_ended_it() -> None:
    _, side, request = stand_ins.scene(8, workers=2)
    side.matched_tokens(request, 0)
    (store,) = stand_ins.computed(side, request, 8, [[1, 2]]).stores
    for fence in ([store.number], []):
        side.heard(StepReport(ended=Counter({store.number: 1})))
        assert side.plan_step({}, lambda _request_id: None, {1}).fence == fence


def test_what_another_connector_loads_within_a_step_is_stored_in_the_next() -> None:
    _, side, request = stand_ins.scene(20)
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, stand_ins.table(20), 0)
    # vLLM counts them as computed, and learns after the step that the load has failed.
    request.num_computed_tokens = 16
    assert stand_ins.computed(side, request, 4).stores == []
    request.num_computed_tokens = 4
    assert [(op.start, op.end) for op in stand_ins.computed(side, request, 16).stores] == [(0, 16)]


def test_in_doubt_about_a_step_all_stores_end_before_it_and_nothing_is_stored() -> None:
    server, side, first = stand_ins.scene(16)
    stand_ins.filled(server, list(range(50, 66)))
    side.matched_tokens(first, 0)
    (store,) = stand_ins.computed(side, first, 16).stores
    second = stand_ins.FakeRequest("b", list(range(50, 70)))
    assert side.matched_tokens(second, 0) == (16, True)
    side.allocated(second, stand_ins.table(20, 200), 16)
    plan = side.plan_in_doubt()
    assert (plan.stores, plan.fence, [load.request_id for load in plan.loads]) == ([], [store.number], ["b"])


def test_a_request_that_something_has_raised_for_is_left_out() -> None:
    server, side, request = stand_ins.scene(20, held=16)
    assert side.matched_tokens(request, 0) == (16, True)
    side.allocated_in_vain("a", stand_ins.table(20), 16)
    assert not server.tickets
    (load,) = side.plan_step({}, lambda _request_id: None).loads
    assert (load.digests, load.skip, load.end) == (b"", 0, 16)
    side.heard(StepReport(loaded=Counter({"a": 1}), failed={"a"}))
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, stand_ins.table(20), 0)
    assert stand_ins.computed(side, request, 20).stores == []
    assert side.tally.counts["miss_requests|error"] == 1


SPEED, ATTENTION, STEP = 10_000.0, 4096.0, 64


def test_an_engine_says_how_fast_it_is_once_it_knows() -> None:
    server, clock = stand_ins.FakeServer(), stand_ins.Clock()
    side = stand_ins.scheduler(server, clock=clock)
    for number in range(6):
        request = stand_ins.FakeRequest(f"r{number}", list(range(number * 4096, number * 4096 + 16 * STEP)))
        assert side.matched_tokens(request, 0) == (0, False)
        side.allocated(request, [[0]], 0)
        while request.num_computed_tokens < request.num_tokens:
            clock.now += 0.001
            began, first = clock.now, request.num_computed_tokens
            stand_ins.computed(side, request, STEP)
            clock.now = began + EngineSpeed(SPEED, ATTENTION).prefill_s(first, first + STEP)
            side.step_ended()
        side.finished(request)
        clock.now += 1.0
    assert server.speeds[0] is None
    speed = server.speeds[-1]
    assert speed.tokens_per_s == pytest.approx(SPEED, rel=0.02)
    assert speed.attention_tokens == pytest.approx(ATTENTION, rel=0.1)
    assert speed.queued_s == 0.0

    # What the prompts before it have still to compute comes before the next one.
    waiting = stand_ins.FakeRequest("w", list(range(2048)))
    side.matched_tokens(waiting, 0)
    side.allocated(waiting, [[0]], 0)
    side.matched_tokens(stand_ins.FakeRequest("next", list(range(9000, 9128))), 0)
    speed = server.speeds[-1]
    assert speed.queued_s == pytest.approx(EngineSpeed(SPEED, ATTENTION).prefill_s(0, 2048), rel=0.05)

    # So does what has come and was not asked for yet, until it is, or has ended.
    others = [
        stand_ins.FakeRequest(f"o{number}", list(range(10_000 * number, 10_000 * number + 1024))) for number in range(3)
    ]
    for other in others:
        side.came(other)
    side.matched_tokens(stand_ins.FakeRequest("another", list(range(9000, 9128))), 0)
    speed = server.speeds[-1]
    waiting_s = EngineSpeed(SPEED, ATTENTION).prefill_s(0, 2048) + 3 * EngineSpeed(SPEED, ATTENTION).prefill_s(0, 1024)
    assert speed.queued_s == pytest.approx(waiting_s, rel=0.05)
    side.finished(others[0])
    side.matched_tokens(others[1], 0)
    side.came(others[1])
    speed = server.speeds[-1]
    waiting_s -= 2 * EngineSpeed(SPEED, ATTENTION).prefill_s(0, 1024)
    assert speed.queued_s == pytest.approx(waiting_s, rel=0.05)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=20), st.sampled_from([0.0, 5.0]))
def test_what_waits_is_the_sum_of_what_came_and_has_not_gone(events: list[tuple[str, int]], attention: float) -> None:
    waiting, model = Waiting(), dict[str, int]()
    for name, tokens in events:
        if tokens:
            waiting.came(name, tokens)
            model[name] = tokens
        else:
            waiting.gone(name)
            model.pop(name, None)
    speed = waiting.behind(EngineSpeed(2.0, attention, 1.0))
    assert speed.queued_s == pytest.approx(
        1.0 + sum(EngineSpeed(2.0, attention).prefill_s(0, each) for each in model.values())
    )
