"""The conformance kit for tiers passes a correct tier, and each planted bug fails the test that is there for it.

Both run in a pytest of their own, in a directory outside of the repository, with the installed package only.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dev.kits.kit_run import Results, run

HERE = Path(__file__).parent

# The planted bug, the test that must fail for it, and what the failure says.
KILLED_BY = {
    "RetainsABuffer": ("test_buffers_stay_the_callers", "BufferError"),
    "ReordersOutcomes": ("test_outcomes_keep_the_order_of_a_mixed_batch", "order of a mixed batch"),
    "RaisesOnAMiss": ("test_a_missing_key_is_an_answer", "no such key"),
    "LiesOnDelete": ("test_a_deleted_value_is_missing", "FOUND"),
    "SaysDeletedOfAnything": ("test_a_deleted_value_is_missing", "DELETED"),
    "ClosesOnlyOnce": ("test_closing_twice_is_closing_once", "closed already"),
    "DropsEmptyValues": ("test_an_empty_value_is_found", "MISSING"),
    "IgnoresTheDeadline": ("test_a_passed_deadline_fails_at_once", "instead of raising TierError"),
    "LooksAtTheDeadlineOnce": ("test_a_short_deadline_ends_a_big_batch", "after its deadline"),
    "LocksWithoutATimeout": ("test_a_put_waits_for_no_other_beyond_its_deadline", "beyond its deadline"),
    "SharesStateBetweenKeys": ("test_every_byte_of_a_key_counts", "FOUND"),
    "MixesConcurrentValues": ("test_readers_see_the_value_of_one_writer", "bytes of several values"),
    "PutsInTwoSteps": ("test_a_new_value_is_seen_whole_or_not_at_all", "a part of a value was visible"),
    "DeletesInTwoSteps": ("test_readers_of_what_is_deleted_see_it_whole_or_missing", "a part of a value"),
    "DeletesTwice": ("test_one_value_is_deleted_once", "deletes it"),
    "CutsLongerValues": ("test_a_longer_value_is_damaged", "DAMAGED"),
    "FailsShorterValues": ("test_a_shorter_value_fills_the_beginning_and_its_length_is_told", "FAILED"),
    "TellsTheLengthOfTheBuffer": (
        "test_a_shorter_value_fills_the_beginning_and_its_length_is_told",
        "as many as were received",
    ),
    "TellsTheLengthThatWasStored": ("test_a_value_comes_back_as_it_was_stored", "other bytes"),
    "TellsThatItFound": ("test_a_value_comes_back_as_it_was_stored", "FOUND"),
    "ReadsOnlyTheFirstPart": ("test_parts_are_one_value", "get_into answered"),
    "OneLongerValueSpoilsTheBatch": ("test_a_longer_value_disturbs_no_other_of_its_batch", "FAILED"),
    "TheFirstOfTwoWins": ("test_the_same_key_twice_is_applied_in_order", "as many as were received"),
    "LeaksAFile": ("test_closing_gives_files_and_threads_back", "/dev/null"),
    "LeaksAThread": ("test_closing_gives_files_and_threads_back", "forgotten"),
    "LeaksAFileWithoutReopen": ("test_closing_gives_files_and_threads_back", "/dev/null"),
    "KeepsMemory": ("test_memory_is_not_kept", "the tier keeps memory"),
    "KeepsMemoryOfFailedCalls": ("test_memory_of_a_failed_call_is_not_kept", "the tier keeps memory"),
    "TouchMakesValues": ("test_touching_changes_no_value_and_makes_none", "FOUND"),
    "AskingForgets": ("test_asking_changes_nothing", "MISSING"),
    "AskingMakesValues": ("test_asking_changes_nothing", "right is MISSING"),
    "AnswersWhenClosed": ("test_a_closed_tier_fails_every_call", "the tier is closed"),
    "RaisesAnotherError": ("test_a_closed_tier_fails_every_call", "ConnectionError"),
    "GoesOnWhenClosed": ("test_closing_ends_the_calls_in_flight", "went on after the tier was closed"),
    "ForgetsWhenClosed": ("test_values_outlive_the_tier", "MISSING"),
    "ClaimsTheUnknown": ("test_its_capabilities_are_optional_methods", "unknown: speed"),
    "ClaimsSharing": ("test_each_sees_what_the_other_stores", "MISSING"),
    "ClaimsSharingWithoutProof": ("test_each_sees_what_the_other_stores", "give `reopen"),
    "RemembersWhatTheOtherDeleted": ("test_each_sees_what_the_other_deletes", "FOUND"),
    "MixesValuesOfTwo": ("test_two_at_work_on_the_same_keys_see_whole_values", "bytes of several values"),
    "ClaimsTtl": ("test_a_value_expires", "did not expire"),
    "TouchDoesNotProlong": ("test_a_touched_value_lives_longer", "its life was not prolonged"),
    "StoringDoesNotProlong": ("test_a_value_that_is_stored_again_lives_longer", "its life was not prolonged"),
    "ClaimsUsage": ("test_usage_follows_what_is_stored_and_deleted", "knows no capacity"),
    "CountsNothing": ("test_usage_follows_what_is_stored_and_deleted", "usage grew by"),
    "CountsTheDeleted": ("test_usage_follows_what_is_stored_and_deleted", "usage shrank by"),
    "SaysStoredWhenFull": ("test_what_is_put_beyond_the_capacity_is_refused_or_makes_room", "is not there"),
    "KnowsNoLimit": ("test_what_is_put_beyond_the_capacity_is_refused_or_makes_room", "<= capacity"),
    "CannotReplaceWhenFull": ("test_a_value_of_a_full_store_may_be_replaced", "leaves room"),
    "LeaksWhatAShorterValueReplaces": ("test_what_is_replaced_and_deleted_leaves_nothing_behind", "no room for"),
    "LeaksAPieceOfTheDeletedUncounted": ("test_what_is_replaced_and_deleted_leaves_nothing_behind", "no room for"),
    "ClaimsScan": ("test_it_lists_what_is_there_with_its_size", "cannot list"),
    "ListsNothing": ("test_it_lists_what_is_there_with_its_size", "are not listed"),
    "ListsOnePage": ("test_it_lists_more_than_one_page", "1000 of 2500"),
    "ListsTheDeleted": ("test_it_lists_what_is_there_with_its_size", "deleted is listed"),
    "ListsOtherSizes": ("test_it_lists_what_is_there_with_its_size", "is listed with"),
    "TouchingIsNoUse": ("test_it_tells_when_a_value_was_used", "touching a value"),
    "ListsWhatMoves": ("test_it_goes_on_while_values_come_and_go", "changed size"),
    "KeepsWhatWasSpoilt": ("test_a_value_that_was_spoilt_in_the_store_leaves_it", "could not be deleted"),
    "NeverReplaces": ("test_no_wrong_byte_leaves_and_all_heals", "are not there"),
}

# The planted bugs of each file.
BUGS = {
    file: re.findall(r"^class Test(\w+)\(", (HERE / file).read_text(), re.MULTILINE)
    for file in ("planted_cases.py", "claims_cases.py")
}

MODEL = "test_it_behaves_like_a_dict"
FOUND_BY_THE_MODEL = ("ReordersOutcomes", "DropsEmptyValues", "CutsLongerValues", "TheFirstOfTwoWins", "AskingForgets")


@pytest.fixture(scope="module")
def correct(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(tmp_path_factory.mktemp("correct"), "kit_cases.py")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Results:
    tests = [(bug, test) for bug, (test, _) in KILLED_BY.items()] + [(bug, MODEL) for bug in FOUND_BY_THE_MODEL]
    chosen = [f"{file}::Test{bug}::{test}" for bug, test in tests for file in BUGS if bug in BUGS[file]]
    return run(tmp_path_factory.mktemp("planted"), *chosen)


def test_a_correct_tier_passes_every_test(correct: Results) -> None:
    for (name, test), result in correct.items():
        if name == "ByName":
            on_the_wire = "faulty_tier" in result.text
            assert result.outcomes == {"skipped" if on_the_wire else "passed"}, (test, result.text)
    assert {test for test, _ in KILLED_BY.values()} | {MODEL} <= {test for name, test in correct if name == "ByName"}


def test_a_tier_that_refuses_a_second_opener_passes(correct: Results) -> None:
    results = {test: result for (name, test), result in correct.items() if name == "Alone"}
    wrong = {test: result.text for test, result in results.items() if not result.outcomes <= {"passed", "skipped"}}
    assert wrong == {}
    assert results["test_a_value_of_a_full_store_may_be_replaced"].outcomes == {"passed"}


def test_what_a_fixture_does_not_give_is_skipped_with_the_reason(correct: Results) -> None:
    results = {test: result for (name, test), result in correct.items() if name == "FromAFixture"}
    assert all(result.outcomes <= {"passed", "skipped"} for result in results.values())
    assert "give `reopen(tier)`" in results["test_values_outlive_the_tier"].text
    assert "give `ttl_options`" in results["test_a_value_expires"].text
    assert "the tier has no usage" in results["test_usage_follows_what_is_stored_and_deleted"].text
    assert "the tier is not shared" in results["test_each_sees_what_the_other_stores"].text
    assert "the tier has no scan" in results["test_it_lists_what_is_there_with_its_size"].text
    assert "give a fixture `faulty_tier`" in results["test_no_wrong_byte_passes_a_faulty_wire"].text
    assert results["test_closing_gives_files_and_threads_back"].outcomes == {"passed"}


def test_a_tier_that_cannot_run_here_is_skipped_with_its_reason(correct: Results) -> None:
    results = [result for (name, _), result in correct.items() if name == "Elsewhere"]
    assert results
    for result in results:
        assert result.outcomes == {"skipped"}
    assert any("this machine has no such store" in result.text for result in results)


def test_what_is_given_wrongly_is_told(correct: Results) -> None:
    assert "give `use`, the plugin's name, or a fixture `tier`" in correct["NothingGiven", "test_it_has_a_name"].text
    assert "unknown key 'stroe'" in correct["WrongOptions", "test_it_has_a_name"].text
    assert "no installed distribution offers the tier 'memroy'" in correct["WrongName", "test_it_has_a_name"].text
    for (name, test), result in correct.items():
        if name in ("NothingGiven", "WrongOptions", "WrongName") and test == "test_it_has_a_name":
            assert result.outcomes == {"error"}


@pytest.mark.parametrize("bug", KILLED_BY)
def test_a_planted_bug_fails_its_test(planted: Results, bug: str) -> None:
    test, says = KILLED_BY[bug]
    result = planted[bug, test]
    assert result.outcomes & {"failure", "error"}, result
    assert says in result.text


@pytest.mark.parametrize("bug", FOUND_BY_THE_MODEL)
def test_the_model_finds_a_planted_bug(planted: Results, bug: str) -> None:
    assert planted[bug, MODEL].outcomes == {"failure"}


def test_every_planted_bug_has_its_test() -> None:
    assert sorted(bug for bugs in BUGS.values() for bug in bugs) == sorted(KILLED_BY)


def test_importing_the_kits_imports_no_test_framework() -> None:
    code = "import sys, kvf_dev.testing.faults; print({'pytest', 'hypothesis', 'torch'} & {*sys.modules})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "set()\n"


def test_both_import_paths_name_the_same_kit() -> None:
    from kvf_dev.testing import TierConformance
    from kvf_dev.testing.tier import TierConformance as TheSame

    assert TierConformance is TheSame
