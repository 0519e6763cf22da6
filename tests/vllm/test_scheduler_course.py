"""The scheduler side of the connector under any course of events."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvf_vllm.scheduler import SchedulerSide
from kvf_vllm.step_messages import StepReport
from tests.vllm.stand_ins import BLOCK, Clock, FakeRequest, FakeServer, computed, scheduler


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
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
