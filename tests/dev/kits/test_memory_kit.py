"""The kit for the memory of L1 passes a correct one, and each planted bug fails its test."""

from __future__ import annotations

import pytest

from tests.dev.kits.kit_run import Results, run
from tests.dev.kits.memory_bug_cases import BUGS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    file = "memory_bug_cases.py"
    chosen = [f"{file}::Test_{bug.replace(' ', '_')}::{test}" for bug, (_, test, _) in BUGS.items()]
    return run(tmp_path_factory.mktemp("kit"), f"{file}::TestRightMemory", f"{file}::TestNoMemory", *chosen)


def test_a_correct_memory_passes_everything(results: Results) -> None:
    mine = {test: result for (case, test), result in results.items() if case == "RightMemory"}
    assert {test for _, test, _ in BUGS.values()} <= set(mine)
    assert set().union(*(each.outcomes for each in mine.values())) == {"passed"}, [*mine.values()]


def test_what_is_not_given_is_one_error(results: Results) -> None:
    mine = [result for (case, _), result in results.items() if case == "NoMemory" and "error" in result.outcomes]
    assert mine
    assert "give `use`, the plugin's name, or a fixture `make_memory`" in mine[0].text


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(results: Results, bug: str) -> None:
    _, test, text = BUGS[bug]
    result = results[f"_{bug.replace(' ', '_')}", test]
    assert "failure" in result.outcomes, result
    assert text in result.text
