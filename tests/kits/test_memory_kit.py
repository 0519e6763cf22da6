"""The kit for the memory of L1 passes a correct one, and each planted bug fails its test."""

from __future__ import annotations

import pytest

from tests.kits.kit_run import Results, run

# The planted bug, the test that must fail for it, and what the failure says.
KILLED_BY = {
    "NoMemory": ("test_all_of_it_is_there_and_writable", "or a fixture `make_memory`"),
    "Smaller": ("test_all_of_it_is_there_and_writable", "capacity"),
    "ReadOnlyView": ("test_all_of_it_is_there_and_writable", "readonly"),
    "ACopyForEachView": ("test_every_view_shows_the_same_bytes", "abc"),
    "PrivateMapping": ("test_another_process_maps_the_descriptor_and_shares_the_bytes", "AssertionError"),
    "Inherited": ("test_no_process_inherits_the_descriptor", "get_inheritable"),
    "ReadyInStart": ("test_it_becomes_usable_in_the_background", "assert False"),
    "NeverWhole": ("test_it_becomes_usable_in_the_background", "for all of the memory to be usable"),
    "Backwards": ("test_it_becomes_usable_in_the_background", "sorted"),
    "ClearsWhatIsInUse": ("test_what_was_written_on_the_way_stays", "all("),
    "GoesOnAfterClose": ("test_closing_ends_the_work_and_lets_go_of_all", "after close"),
    "KeepsTheDescriptor": ("test_closing_ends_the_work_and_lets_go_of_all", "for descriptors, mappings and threads"),
    "ClosesTwice": ("test_closing_ends_the_work_and_lets_go_of_all", "Bad file descriptor"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(tmp_path_factory.mktemp("kit"), "memory_bug_cases.py")


def test_a_correct_memory_passes_everything(results: Results) -> None:
    mine = {test: result.outcomes for (case, test), result in results.items() if case == "RightMemory"}
    assert len(mine) == 8
    assert set().union(*mine.values()) == {"passed"}


@pytest.mark.parametrize("bug", KILLED_BY)
def test_a_planted_bug_is_found(results: Results, bug: str) -> None:
    test, text = KILLED_BY[bug]
    result = results[bug, test]
    assert result.outcomes & {"failure", "error"}
    assert text in result.text


def test_every_bug_is_one_of_these(results: Results) -> None:
    assert {case for case, _ in results} == {*KILLED_BY, "RightMemory"}
