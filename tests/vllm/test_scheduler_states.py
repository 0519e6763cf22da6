"""The scheduler side of the connector with recurrent states: what vLLM hands over is stored with the KV before it, and
nothing else of a state's block table is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_vllm.layouts import GroupFacts, Handover, complete_states, only_between_steps
from kvf_vllm.scheduler import SchedulerSide
from kvf_vllm.step_messages import StepPlan, StepReport
from kvframework.api.layout import NO_BLOCK
from tests.vllm.stand_ins import CHUNK, RECURRENT, FakeRequest, FakeServer, filled, scheduler


def table(blocks: int) -> list[list[int]]:
    """As vLLM has it: of the states only the last two places are no null block, and say nothing to us."""
    passed = [0] * max(blocks - 2, 0)
    return [list(range(100, 100 + blocks)), *([*passed, 300, 301][-blocks:] for _ in range(2))]


def step(side: SchedulerSide, request: FakeRequest, tokens: int, states: Iterable[Handover] = ()) -> StepPlan:
    blocks = -(-(request.num_computed_tokens + tokens) // CHUNK)
    plan = side.plan_step(
        {request.request_id: tokens}, lambda _request_id: table(blocks), (), {request.request_id: list(states)}
    )
    request.num_computed_tokens += tokens
    return plan


def begun(tokens: int) -> tuple[SchedulerSide, FakeRequest]:
    side, request = scheduler(FakeServer(), groups=RECURRENT), FakeRequest("a", list(range(tokens)))
    side.matched_tokens(request, 0)
    return side, request


def test_states_within_a_step_end_stores_of_their_own() -> None:
    side, request = begun(3 * CHUNK + 1)
    handed = [(group, 10 * group + at, at * CHUNK) for at in (1, 3) for group in (1, 2)]
    stores = step(side, request, 3 * CHUNK + 1, handed).stores
    assert [(store.start, store.end) for store in stores] == [(0, CHUNK), (CHUNK, 3 * CHUNK)]
    assert [store.block_ids for store in stores] == [[[100], [11], [21]], [[101, 102], [NO_BLOCK, 13], [NO_BLOCK, 23]]]
    assert len({store.number for store in stores}) == 2


def test_states_of_what_is_stored_already_are_left_out() -> None:
    """vLLM also hands over a state that was loaded."""
    side, request = begun(2 * CHUNK + 1)
    step(side, request, CHUNK, [(1, 41, CHUNK), (2, 42, CHUNK)])
    handed = [(1, 41, CHUNK), (2, 42, CHUNK), (1, 43, 2 * CHUNK), (2, 44, 2 * CHUNK)]
    (store,) = step(side, request, CHUNK, handed).stores
    assert (store.start, store.block_ids) == (CHUNK, [[101], [43], [44]])


def test_a_state_is_of_no_use_without_those_of_the_other_groups_or_within_a_chunk() -> None:
    side, request = begun(2 * CHUNK + 1)
    handed = [(1, 41, 2 * CHUNK), (1, 43, CHUNK + 2), (2, 44, CHUNK + 2), (2, 0, 2 * CHUNK), (0, 45, 2 * CHUNK)]
    (store,) = step(side, request, 2 * CHUNK, handed).stores
    assert store.block_ids[1:] == [[NO_BLOCK, NO_BLOCK]] * 2


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_behind_drafts_a_state_is_stored_when_its_tokens_are_known(accepted: int) -> None:
    """vLLM computes drafts beyond the chunk's end, and names the state there once its tokens are accepted: in that step
    or in a later one. It tells connectors to store when it knows which drafts those are."""
    end = 2 * CHUNK
    side, request = begun(end - 1)
    assert [store.end for store in step(side, request, CHUNK, [(1, 31, CHUNK), (2, 32, CHUNK)]).stores] == [CHUNK]
    handed = [(1, 41, end), (2, 42, end)]
    request.num_computed_tokens = end - 2
    # One token and three drafts, of which the chunk's last token is the first.
    assert not step(side, request, 4).stores
    request.all_token_ids += range(accepted + 1)
    request.num_computed_tokens = end - 1 + accepted
    (store,) = step(side, request, 4, handed).stores
    assert (store.start, store.end, store.block_ids[1:]) == (CHUNK, end, [[41], [42]])


def test_a_store_ends_before_the_blocks_of_its_states_are_written() -> None:
    side, request = begun(CHUNK + 1)
    (store,) = step(side, request, CHUNK, [(1, 41, CHUNK), (2, 42, CHUNK)]).stores
    side.finished(request)
    assert side.plan_step({}, lambda _request_id: None, {43, 300}).fence == []
    assert side.plan_step({}, lambda _request_id: None, {42}).fence == [store.number]


def test_a_hit_leaves_a_token_to_compute_and_loads_into_the_last_place_of_each_state() -> None:
    server = FakeServer()
    filled(server, list(range(2 * CHUNK)))
    side = scheduler(server, groups=RECURRENT)
    whole = FakeRequest("a", list(range(2 * CHUNK)))
    # The last token is computed after the state before it, not after a state that has seen it.
    assert side.matched_tokens(whole, 0) == (CHUNK, True)
    longer = FakeRequest("b", list(range(2 * CHUNK + 1)))
    assert side.matched_tokens(longer, 0) == (2 * CHUNK, True)
    side.allocated(longer, [[1, 2], [0, 3], [0, 4]], 2 * CHUNK)
    (load,) = side.plan_step({}, lambda _request_id: None).loads
    assert load.block_ids == [[1, 2], [0, 3], [0, 4]]
    side.heard(StepReport(loaded={"b": 1}))
    side.finished(whole)
    assert not server.tickets


@pytest.mark.parametrize("fields", [{"state": True}, {"window": CHUNK}], ids=["state", "window"])
def test_states_and_windows_are_loaded_between_steps_even_in_a_single_group(fields: dict[str, Any]) -> None:
    """A load within a step that fails would be told by its blocks, among them the null block of all requests."""
    alone = (GroupFacts(("layer",), CHUNK, **fields),)
    assert only_between_steps(alone)
    server = FakeServer()
    filled(server, list(range(CHUNK)))
    side = scheduler(server, groups=alone, load="sync")
    assert side.matched_tokens(FakeRequest("a", list(range(CHUNK + 1))), 0) == (CHUNK, True)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 3).map(lambda chunks: chunks * CHUNK))))
def test_only_complete_sets_of_states_count(handed: list[Handover]) -> None:
    for tokens, blocks in complete_states(RECURRENT, handed).items():
        assert blocks.keys() == {1, 2}
        for group, block in blocks.items():
            assert block
            assert (group, block, tokens) in handed
