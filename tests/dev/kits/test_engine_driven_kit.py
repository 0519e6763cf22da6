"""The transport kit finds what an engine-driven transport does wrong with plans, buffers, tensors and threads."""

from __future__ import annotations

import re

import pytest

from tests.dev.kits.kit_run import HERE, Results, run

FILE = "engine_driven_plants_cases.py"
FAILS = "test_a_copy_in_the_engine_that_fails_is_one_miss"
# By bug: the test that finds it, and what it says.
KILLED_BY = {
    "CommitsFirst": ("test_ranges_are_written_before_they_are_published", "published before"),
    "PublishesWhatFailed": (f"{FAILS}[store]", "a store whose copy failed was answered as one that succeeded"),
    "KeepsItsRanges": (f"{FAILS}[store]", "to give its ranges and pins back did not come true"),
    "AnswersAHit": (f"{FAILS}[load]", "a load whose copy failed was answered as one that succeeded"),
    "RemembersTheTensors": ("test_tensors_are_those_of_the_submit", "a transfer of other tensors than the first"),
    "LoadsHalfOfTheWire": ("test_the_wire_carries_the_same_as_the_arena[nhd]", "24 chunks over the wire"),
    "StagesInOnePlace": ("test_buffers_stay_as_they_are_until_they_are_answered", "before the server had answered"),
    "WritesAgainAfterAFailure": (
        "test_buffers_are_never_written_again_after_a_failure",
        "buffers of a store that was not answered were written again",
    ),
    "TakesAnyBlock": ("test_blocks_that_the_tensors_of_a_submit_lack_are_refused", "no BadBlockIds"),
    "LeavesItsThread": ("test_close_gives_threads_and_files_back[wire]", "close leaves behind: thread"),
}

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(tmp_path_factory.mktemp("kit"), *(f"{FILE}::Test{bug}::{test}" for bug, (test, _) in KILLED_BY.items()))


@pytest.mark.parametrize("bug", KILLED_BY)
def test_a_planted_bug_fails_by_its_promise(results: Results, bug: str) -> None:
    test, says = KILLED_BY[bug]
    result = results[bug, test.partition("[")[0]]
    assert result.outcomes & {"failure", "error"}, result
    assert says in result.text, result.text


def test_every_planted_bug_has_its_test() -> None:
    table = (HERE / FILE).read_text().partition("\nBUGS")[2].partition("\n}\n")[0]
    assert re.findall(r'^    "(\w+)":', table, re.MULTILINE) == list(KILLED_BY)
