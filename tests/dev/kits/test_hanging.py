"""No kit hangs: a test that does not end fails by its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dev.kits.kit_run import HERE, Results, run


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    classes = ("HoldsItsLockOverYield", "CannotBeMade")
    return run(tmp_path_factory.mktemp("hang"), *(f"hang_cases.py::Test{each}" for each in classes))


@pytest.mark.parametrize("case", ["HoldsItsLockOverYield", "CannotBeMade"])
def test_what_does_not_end_fails_by_its_name_and_the_rest_is_left_out(results: Results, case: str) -> None:
    by_test = {test: result for (name, test), result in results.items() if name == case}
    ((test, failed),) = [(t, each) for t, each in by_test.items() if each.outcomes & {"failure", "error"}]
    assert test in failed.text
    assert "still runs after 1 s" in failed.text
    assert "hang_cases.py" in failed.text, "the traceback shows where it waits"
    assert any("did not end, so the other tests" in each.text for each in by_test.values())


@pytest.mark.parametrize(("case", "shows"), [("NativeLoop", "in <lambda>"), ("LeavesAThread", "Timeout")])
def test_the_process_ends_and_shows_the_stacks(tmp_path: Path, case: str, shows: str) -> None:
    (tmp_path / "hang_cases.py").write_text((HERE / "hang_cases.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"hang_cases.py::Test{case}", "-x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode
    assert shows in done.stdout + done.stderr
