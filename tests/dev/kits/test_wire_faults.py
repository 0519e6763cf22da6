"""The kit's tests of faults on the wire pass a network tier that is right, and each planted bug fails one of them."""

from __future__ import annotations

import re

import pytest

from tests.dev.kits.kit_run import Results, run

# The planted bug, the test that must fail for it, with which fault, and what the failure says.
KILLED_BY = {
    "KeepsALateConnection": ("test_what_a_stalled_wire_held_back_is_no_answer_to_the_next_call", "", "b'one'"),
    "WaitsForever": ("test_a_fault_on_the_wire_is_an_outcome_or_a_tier_error", "[stall]", "a call does not end"),
    "LeavesItsCallsAtClose": ("test_closing_ends_the_calls_that_wait_for_a_stalled_wire", "[get_into]", "close"),
    "LeavesBrokenConnections": ("test_failures_use_nothing_up", "", "broken connections"),
    "RaisesWhatTheSocketDoes": ("test_a_fault_on_the_wire_is_an_outcome_or_a_tier_error", "[reset]", "whatever it was"),
    "NeverConnectsAgain": ("test_a_fault_on_the_wire_is_an_outcome_or_a_tier_error", "[refuse]", "Bad file descriptor"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    wrong = [f"wire_cases.py::Test{bug}::{test}{fault}" for bug, (test, fault, _) in KILLED_BY.items()]
    return run(tmp_path_factory.mktemp("wire"), "wire_cases.py::TestOverTcp", *wrong)


def test_a_correct_network_tier_passes(results: Results) -> None:
    over_tcp = {test: result for (name, test), result in results.items() if name == "OverTcp"}
    assert {test for test, _, _ in KILLED_BY.values()} <= over_tcp.keys()
    for test, result in over_tcp.items():
        needs_more = re.search(
            "the tier has no (scan|usage|touch)|give `(ttl|capacity)_options`|no plugin's name", result.text
        )
        assert result.outcomes <= ({"passed", "skipped"} if needs_more else {"passed"}), (test, result.text)


@pytest.mark.parametrize("bug", KILLED_BY)
def test_a_planted_bug_fails_its_test(results: Results, bug: str) -> None:
    test, _, says = KILLED_BY[bug]
    assert results[bug, test].outcomes == {"failure"}
    assert says in results[bug, test].text
