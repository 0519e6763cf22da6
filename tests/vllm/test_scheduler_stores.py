"""The scheduler side of the connector as a state machine: which chunks are stored when, and which stores must end
before their blocks are written."""

from __future__ import annotations

from collections import Counter

from kvf_vllm.step_messages import StepReport
from kvframework.api.layout import NO_BLOCK
from tests.vllm.stand_ins import WINDOWED, FakeRequest, FakeServer, computed, filled, scene, scheduler, table


def test_a_prompt_is_stored_chunk_by_chunk_and_found_again() -> None:
    server, side, request = scene(30)
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
    _, side, request = scene(6)
    side.matched_tokens(request, 0)
    assert not computed(side, request, 6).stores
    for token in (6, 7, 8):
        request.all_token_ids.append(token)
        plan = computed(side, request, 1)
        assert [(op.start, op.end) for op in plan.stores] == ([(0, 8)] if token == 7 else [])


def test_drafted_tokens_are_not_stored() -> None:
    _, side, request = scene(6)
    side.matched_tokens(request, 0)
    # Two known tokens are missing to a chunk; a step that also computes five drafts must not fill it.
    assert not computed(side, request, 11, table(11)).stores


def test_blocks_that_a_window_gave_away_are_marked() -> None:
    _, side, request = scene(16, groups=WINDOWED)
    side.matched_tokens(request, 0)
    plan = computed(side, request, 16, [[7, 8, 9, 10], [0, 0, 5, 6]])
    assert [op.block_ids for op in plan.stores] == [[[7, 8, 9, 10], [NO_BLOCK, NO_BLOCK, 5, 6]]]


def test_a_missing_block_of_full_attention_is_never_stored() -> None:
    _, side, request = scene(16)
    side.matched_tokens(request, 0)
    assert not computed(side, request, 16, [[7, 0, 9, 10]]).stores
    assert side.tally.counts["unstorable_chunks"] == 1


def test_what_was_not_sent_is_stored_later() -> None:
    _, side, request = scene(24)
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


def test_stores_end_before_another_connector_loads_into_their_blocks() -> None:
    """vLLM's MultiConnector tells the others the blocks, too; of a load between steps the step itself says nothing."""
    side = scheduler(FakeServer())
    request = FakeRequest("a", list(range(16)))
    side.matched_tokens(request, 0)
    (store,) = computed(side, request, 16, [[1, 2, 3, 4]]).stores
    side.finished(request)
    for name, table_, fence in (("b", [4, 11, 12, 13], []), ("c", [20, 3, 21, 22], [store.number])):
        foreign = FakeRequest(name, list(range(50, 66)))
        assert side.matched_tokens(foreign, 4) == (0, False)
        side.allocated(foreign, [table_], 0)
        assert side.plan_step({}, lambda _request_id: None).fence == fence
    assert side.plan_step({}, lambda _request_id: None).fence == []


def test_what_vllm_held_itself_is_stored_although_the_rest_was_loaded() -> None:
    _, side, request = scene(24, held=16)
    assert side.matched_tokens(request, 8) == (8, True)
    side.allocated(request, table(24), 8)
    side.plan_step({}, lambda _request_id: None)
    side.heard(StepReport(loaded=Counter({"a": 1})))
    request.num_computed_tokens = 16
    assert [(op.start, op.end) for op in computed(side, request, 8).stores] == [(0, 24)]


def test_a_store_is_fenced_until_the_last_worker_has_ended_it() -> None:
    _, side, request = scene(8, workers=2)
    side.matched_tokens(request, 0)
    (store,) = computed(side, request, 8, [[1, 2]]).stores
    for fence in ([store.number], []):
        side.heard(StepReport(ended=Counter({store.number: 1})))
        assert side.plan_step({}, lambda _request_id: None, {1}).fence == fence


def test_what_another_connector_loads_within_a_step_is_stored_in_the_next() -> None:
    side = scheduler(FakeServer())
    request = FakeRequest("a", list(range(20)))
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, table(20), 0)
    # vLLM counts them as computed, and learns after the step that the load has failed.
    request.num_computed_tokens = 16
    assert computed(side, request, 4).stores == []
    request.num_computed_tokens = 4
    assert [(op.start, op.end) for op in computed(side, request, 16).stores] == [(0, 16)]


def test_what_this_connector_has_loaded_is_followed_at_once() -> None:
    _, side, request = scene(24, held=16)
    assert side.matched_tokens(request, 0) == (16, True)
    side.allocated(request, table(24), 16)
    side.plan_step({}, lambda _request_id: None)
    side.heard(StepReport(loaded=Counter({"a": 1})))
    side.allocated(request, table(24), 0)
    request.num_computed_tokens = 16
    assert [(op.start, op.end) for op in computed(side, request, 8).stores] == [(16, 24)]


def test_in_doubt_about_a_step_all_stores_end_before_it_and_nothing_is_stored() -> None:
    server = FakeServer()
    filled(server, list(range(50, 66)))
    side = scheduler(server)
    first = FakeRequest("a", list(range(16)))
    side.matched_tokens(first, 0)
    (store,) = computed(side, first, 16).stores
    second = FakeRequest("b", list(range(50, 70)))
    assert side.matched_tokens(second, 0) == (16, True)
    side.allocated(second, table(20, 200), 16)
    plan = side.plan_in_doubt()
    assert (plan.stores, plan.fence, [load.request_id for load in plan.loads]) == ([], [store.number], ["b"])


def test_a_request_that_something_has_raised_for_is_left_out() -> None:
    server, side, request = scene(20, held=16)
    assert side.matched_tokens(request, 0) == (16, True)
    side.allocated_in_vain("a", table(20), 16)
    assert not server.tickets
    (load,) = side.plan_step({}, lambda _request_id: None).loads
    assert (load.digests, load.skip, load.end) == (b"", 0, 16)
    side.heard(StepReport(loaded=Counter({"a": 1}), failed={"a"}))
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, table(20), 0)
    assert computed(side, request, 20).stores == []
    assert side.tally.counts["miss_requests|error"] == 1
