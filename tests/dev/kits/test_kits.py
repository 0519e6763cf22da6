"""What all kits do: they end, they begin with the simplest test, and they make the plugin in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvf_dev.testing.kit import NamedKit
from tests.dev.kits.kit_run import HERE, Results, run
from tests.dev.kits.memory_bug_cases import BUGS


def test_the_simplest_round_trip_runs_first(tmp_path: Path) -> None:
    source = "from kvf_dev.testing import TransportConformance\nclass TestIt(TransportConformance): ..."
    (tmp_path / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", os.devnull, "--rootdir", ".", "test_it.py"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[0].partition("[")[0].endswith("::test_what_is_stored_comes_back_in_other_blocks")


class Made:
    def __init__(self, name: object) -> None:
        self.name = name

    class Inner: ...


def test_a_class_goes_with_its_attributes() -> None:
    told = NamedKit().elsewhere(Made({"a": (1, b"\x00", None)}), "print(type(made).__qualname__, made.name)", seed=1)
    assert told == b"Made {'a': (1, b'\\x00', None)}\n"
    assert NamedKit().elsewhere(Made(b"x" * (1 << 20)), "print(len(made.name))", seed=1) == b"1048576\n"
    assert NamedKit().elsewhere(Made.Inner(), "print(vars(made))", seed=1) == b"{}\n"


def test_what_cannot_go_skips_the_test() -> None:
    class Local(Made):
        """One that no module has under its name."""

    for made in (Local("a"), Made(threading.Lock())):
        with pytest.raises(pytest.skip.Exception, match="Set `use`"):
            NamedKit().elsewhere(made, "", seed=1)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    classes = ("HoldsItsLockOverYield", "CannotBeMade")
    return run(tmp_path_factory.mktemp("hang"), *(f"hang_cases.py::Test{each}" for each in classes))


@pytest.mark.parametrize("case", ["HoldsItsLockOverYield", "CannotBeMade"])
def test_what_does_not_end_fails_by_its_name_and_the_rest_is_left_out(results: Results, case: str) -> None:
    by_test = {test: result for (name, test), result in results.items() if name == case}
    ((test, failed),) = [(t, each) for t, each in by_test.items() if each.outcomes & {"failure", "error"}]
    assert test in failed.text
    assert "still runs after " in failed.text
    assert "hang_cases.py" in failed.text, "the traceback shows where it waits"
    assert any("did not end, so the other tests" in each.text for each in by_test.values())


@pytest.mark.parametrize(("case", "shows"), [("NativeLoop", "in <lambda>"), ("LeavesAThread", "Timeout")])
def test_the_process_ends_and_shows_the_stacks(tmp_path: Path, case: str, shows: str) -> None:
    (tmp_path / "hang_cases.py").write_text((HERE / "hang_cases.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"hang_cases.py::Test{case}", "-x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode
    assert shows in done.stdout + done.stderr


@pytest.fixture(scope="module")
def memory_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    file = "memory_bug_cases.py"
    chosen = [f"{file}::Test_{bug.replace(' ', '_')}::{test}" for bug, (_, test, _) in BUGS.items()]
    return run(tmp_path_factory.mktemp("kit"), f"{file}::TestRightMemory", f"{file}::TestNoMemory", *chosen)


def test_a_correct_memory_passes_everything(memory_results: Results) -> None:
    mine = {test: result for (case, test), result in memory_results.items() if case == "RightMemory"}
    assert {test for _, test, _ in BUGS.values()} <= set(mine)
    assert set().union(*(each.outcomes for each in mine.values())) == {"passed"}, [*mine.values()]


def test_what_is_not_given_is_one_error(memory_results: Results) -> None:
    mine = [result for (case, _), result in memory_results.items() if case == "NoMemory" and "error" in result.outcomes]
    assert mine
    assert "Set `use`, the plugin's name, or define a fixture `make_memory`" in mine[0].text


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_of_memory_is_found(memory_results: Results, bug: str) -> None:
    _, test, text = BUGS[bug]
    result = memory_results[f"_{bug.replace(' ', '_')}", test]
    assert "failure" in result.outcomes, result
    assert text in result.text


def test_a_run_ends_with_a_summary_and_failures_end_the_rest(tmp_path: Path) -> None:
    source = "from kvf_dev.testing.kit import Kit\nclass TestIt(Kit):\n    stop_after = 1\n    def test_budget(self): "
    source += "self.must_take('it', 0.0, 1.0)\n    def test_wrong(self): assert 0\n    def test_more(self): ...\n"
    (tmp_path / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "test_it.py"]
    environment = {**os.environ, "KVF_KIT_REPORT": "report.json"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout
    for line in ("1 passed, 1 failed, 1 skipped, in 0 s", "skipped 1: Skipped until test_wrong pass", "it: 0.00 ms of"):
        assert line in done
    assert json.loads((tmp_path / "report.json").read_text())["kits"][0]["failed"] == {"test_wrong": 1}
