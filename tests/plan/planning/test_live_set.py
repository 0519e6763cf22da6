"""The live set against a count by hand."""

from __future__ import annotations

from hypothesis import given

from kvf_plan.planning.prompts import prompts_of
from tests.plan.planning.traces import MadeTrace, traces


@given(traces())
def test_it_is_what_will_be_asked_for_again(trace: MadeTrace) -> None:
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
