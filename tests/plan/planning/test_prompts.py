"""Prompts as paths in the tree of their prefixes, and the live set against a count by hand."""

from __future__ import annotations

from hypothesis import given

from kvf_plan.planning.prompts import prompts_of
from kvf_plan.trace.form import Request
from tests.plan.planning.traces import MadeTrace, traces


@given(traces())
def test_two_prompts_share_a_node_where_they_share_all_its_tokens(trace: MadeTrace) -> None:
    made = prompts_of(trace, 4)
    named: dict[tuple[int, ...], int] = {}
    for request, prompt in zip(trace, made.prompts, strict=True):
        full = request.tokens // 4
        assert len(prompt.nodes) == full
        for index, node in enumerate(prompt.nodes):
            prefix = tuple(request.chunks[: index + 1])
            assert named.setdefault(prefix, node) == node
    assert len(set(named.values())) == len(named) == made.nodes


@given(traces())
def test_nodes_are_numbered_in_the_order_of_first_use(trace: MadeTrace) -> None:
    seen = dict.fromkeys(node for prompt in prompts_of(trace, 4).prompts for node in prompt.nodes)
    assert list(seen) == list(range(len(seen)))


def test_the_chunk_that_is_not_full_is_left_out() -> None:
    counted, not_counted = Request(0.0, 40, 0, [1, 2, 3]), Request(0.0, 40, 0, [1, 2])
    for request in (counted, not_counted):
        assert len(prompts_of([request], 16).prompts[0].nodes) == 2


def test_ids_that_do_not_name_what_comes_before_are_set_right() -> None:
    made = prompts_of([Request(0.0, 8, 0, [1, 9]), Request(1.0, 8, 0, [2, 9])], 4)
    assert [list(prompt.nodes) for prompt in made.prompts] == [[0, 1], [2, 3]]


@given(traces())
def test_the_live_set_is_what_will_be_asked_for_again(trace: MadeTrace) -> None:
    prompts = prompts_of(trace, 4)
    uses: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts.prompts):
        for node in prompt.nodes:
            uses.setdefault(node, []).append(index)
    live = [sum(1 for each in uses.values() if each[0] <= index < each[-1]) for index in range(len(prompts.prompts))]
    found = prompts.live_set()
    assert found.most == max(live)
    assert found.reused == sum(1 for each in uses.values() if len(each) > 1)
    assert (found.stored, found.uses) == (len(uses), sum(map(len, uses.values())))
    assert found.hits == found.uses - found.stored
    if found.most:
        assert prompts.prompts[live.index(found.most)].at == found.at
