"""The conformance kit for tiers passes a correct tier, in a pytest of its own outside of the repository."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.dev.kits.kit_run import Results, run
from tests.dev.kits.test_planted_bugs import BUGS


@pytest.fixture(scope="module")
def correct(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(tmp_path_factory.mktemp("correct"), "kit_cases.py")


def test_a_correct_tier_passes_every_test(correct: Results) -> None:
    for (name, test), result in correct.items():
        if name == "ByName":
            on_the_wire = "faulty_tier" in result.text
            assert result.outcomes == {"skipped" if on_the_wire else "passed"}, (test, result.text)
    planted = {test.partition("[")[0] for file, test, _, _ in BUGS if file == "tier_cases.py"}
    assert planted <= {test for name, test in correct if name == "ByName"}


def test_a_tier_that_refuses_a_second_opener_passes(correct: Results) -> None:
    results = {test: result for (name, test), result in correct.items() if name == "Alone"}
    wrong = {test: result.text for test, result in results.items() if not result.outcomes <= {"passed", "skipped"}}
    assert wrong == {}
    assert results["test_what_is_put_beyond_the_capacity_is_refused_or_makes_room"].outcomes == {"passed"}


def test_what_a_fixture_does_not_give_is_skipped_with_the_reason(correct: Results) -> None:
    results = {test: result for (name, test), result in correct.items() if name == "FromAFixture"}
    assert all(result.outcomes <= {"passed", "skipped"} for result in results.values())
    assert "Define `reopen(tier)`" in results["test_values_outlive_the_tier"].text
    assert "Define `ttl_options`" in results["test_a_value_expires"].text
    assert "The tier has no usage" in results["test_usage_is_right_after_concurrent_calls"].text
    assert "The tier is not shared" in results["test_each_sees_what_the_other_does"].text
    assert "The tier has no scan" in results["test_it_tells_when_a_value_was_used"].text
    assert "Define a fixture `faulty_tier`" in results["test_failures_use_nothing_up"].text
    assert results["test_closing_gives_files_and_threads_back"].outcomes == {"passed"}


def test_a_tier_that_cannot_run_here_is_skipped_with_its_reason(correct: Results) -> None:
    results = [result for (name, _), result in correct.items() if name == "Elsewhere"]
    assert results
    for result in results:
        assert result.outcomes == {"skipped"}
    assert any("this machine has no such store" in result.text for result in results)


def test_what_is_given_wrongly_is_told(correct: Results) -> None:
    assert "define a fixture `tier`" in correct["NothingGiven", "test_it_has_a_name"].text
    assert "unknown key 'stroe'" in correct["WrongOptions", "test_it_has_a_name"].text
    assert "no installed distribution offers the tier 'memroy'" in correct["WrongName", "test_it_has_a_name"].text
    for (name, test), result in correct.items():
        if name in ("NothingGiven", "WrongOptions", "WrongName") and test == "test_it_has_a_name":
            assert result.outcomes == {"error"}


def test_importing_the_kits_imports_no_test_framework() -> None:
    code = "import sys, kvf_dev.testing.faults; print({'pytest', 'hypothesis', 'torch'} & {*sys.modules})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "set()\n"
