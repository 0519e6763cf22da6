"""The table of engines says what marked tests have proven, and nothing that no test is marked with."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.docs.engine_table import NOTHING, PAGES, table
from tests.support.engine_results import ENGINES, FEATURES, HOW, EngineResults, note_features, recorded

ROOT = Path(__file__).resolve().parents[2]
RECORDED = [(engine, feature, found) for engine in ENGINES for feature, found in recorded(engine)["features"].items()]


@pytest.mark.parametrize(
    ("engine", "feature", "found"), [pytest.param(*each, id=f"{each[0]}, {each[1]}") for each in RECORDED]
)
def test_what_is_recorded_is_a_cell_with_marked_tests(engine: str, feature: str, found: dict[str, Any]) -> None:
    assert feature in FEATURES
    assert found["how"] in HOW
    assert (PAGES / ENGINES[engine].page).exists()
    assert found["tests"]
    for test in found["tests"]:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text()
        assert f"def {name.rpartition('::')[2]}(" in text, test
        # A row of test_engine_examples.py names the engine once, beside the example.
        assert re.search(rf'"{re.escape(engine)}"', text), test
        assert f'"{feature}"' in text, test


def reported(nodeid: str, outcome: str, *features: tuple[str, str, str]) -> Any:
    return SimpleNamespace(
        nodeid=nodeid,
        when="call",
        passed=outcome == "passed",
        failed=outcome == "failed",
        user_properties=[("engine_feature", list(each)) for each in features],
    )


def run(folder: Path, *reports: Any) -> dict[str, Any]:
    results = EngineResults(folder)
    for report in reports:
        results.pytest_runtest_logreport(report)
    results.pytest_sessionfinish()
    found: dict[str, Any] = recorded("MLX", folder)["features"]
    return found


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The release of the engine."""
    releases = ["1"]
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: releases[-1])
    return releases


@pytest.mark.usefixtures("release")
def test_a_feature_is_proven_by_all_its_tests_that_ran(tmp_path: Path) -> None:
    hybrid, new, windows = (("MLX", name, "tested") for name in ("hybrid models", "new process", "sliding windows"))
    found = run(
        tmp_path,
        reported("t.py::a[x]", "passed", hybrid, new),
        reported("t.py::a[y]", "passed", hybrid),
        reported("t.py::b", "failed", new),
        reported("t.py::c", "skipped", windows),
        reported("t.py::d", "passed", ("MLX", "images", "refused")),
    )
    assert found == {
        "hybrid models": {"how": "tested", "tests": ["t.py::a"]},
        "images": {"how": "refused", "tests": ["t.py::d"]},
    }
    assert "| **images**" in table(tmp_path)
    assert "[refused](../../t.py)" in table(tmp_path)
    assert "LoRA" not in table(tmp_path)
    assert NOTHING in table(tmp_path)


def test_a_later_run_renews_what_ran_and_another_release_all(tmp_path: Path, release: list[str]) -> None:
    hybrid, new = ("MLX", "hybrid models", "tested"), ("MLX", "new process", "tested")
    run(tmp_path, reported("t.py::a", "passed", hybrid), reported("t.py::b", "passed", new))
    assert set(run(tmp_path, reported("t.py::a", "skipped", hybrid))) == {"hybrid models", "new process"}
    assert set(run(tmp_path, reported("t.py::a", "failed", hybrid))) == {"new process"}
    release.append("2")
    assert set(run(tmp_path, reported("t.py::a", "passed", hybrid))) == {"hybrid models"}
    assert json.loads((tmp_path / "MLX.json").read_text())["release"] == "mlx-lm 2"


@pytest.mark.parametrize("named", [("MLZ", "images"), ("MLX", "pictures"), ("MLX", "images", "maybe")])
def test_a_marker_names_what_the_table_has(named: tuple[str, ...]) -> None:
    marker = pytest.mark.engine_feature(*named).mark
    item: Any = SimpleNamespace(nodeid="t", iter_markers=lambda _name: [marker], user_properties=[])
    with pytest.raises(pytest.UsageError, match="engine_feature"):
        note_features([item])
