"""The numbers of a trace: its live set among them, when it is largest late."""

from __future__ import annotations

from kvf_plan.trace.form import Request
from kvf_plan.trace.summary import summarise


def test_the_live_set_is_what_will_be_asked_for_again() -> None:
    prompts = [[1, 2], [3], [1, 2], [1, 4], [5, 6], [5, 6, 4]]
    summary = summarise(Request(float(at), 16 * len(ids), 0, ids) for at, ids in enumerate(prompts))
    assert (summary.live_chunks, summary.unique_chunks, summary.chunks, summary.span_s) == (3, 6, 12, 5.0)
