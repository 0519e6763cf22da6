"""Runs a kit in a pytest outside of the repository, with the installed package only; or one test of it, by hand."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from tests.core.registry.fake_distributions import install

HERE = Path(__file__).parent


class Result(NamedTuple):
    """What became of one test, with all its parameters: "passed", "failed", "skipped" or "error", and the texts."""

    outcomes: set[str]
    text: str


# By class (without "Test") and test.
Results = dict[tuple[str, str], Result]


def run(directory: Path, *arguments: str) -> Results:
    """Runs pytest with `arguments` in `directory`, where the tiers and the cases of this folder are."""
    for file in (*HERE.glob("*_tier.py"), *HERE.glob("*_cases.py")):
        if not file.name.startswith("test_"):
            shutil.copy(file, directory)
    entry_points = {"tier.memory": "memory_tier", "tier.alone": "memory_tier", "tier.elsewhere": "memory_tier"}
    install(directory, "kitmemory", entry_points)
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "--strict-config", "-p", "no:cacheprovider"]
    command += ["-W", "error", "--tb", "short", "--hypothesis-seed", "0", "--rootdir", ".", "-c", os.devnull]
    command += ["--junitxml", "results.xml", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert (directory / "results.xml").exists(), done.stdout + done.stderr
    results: Results = {}
    for case in ElementTree.parse(directory / "results.xml").iter("testcase"):
        name = case.attrib.get("name", "").partition("[")[0]
        key = (case.attrib.get("classname", "").rpartition(".")[2].removeprefix("Test"), name)
        outcomes, text = results.get(key, Result(set(), ""))
        outcomes |= {each.tag for each in case} & {"failure", "error", "skipped"} or {"passed"}
        for each in case:
            text += each.attrib.get("message", "") + (each.text or "")
        results[key] = Result(outcomes, text)
    assert results, done.stdout + done.stderr
    return results


def call(kit: object, test: str, fixtures: Mapping[str, Any]) -> None:
    """Run the test `name` or `name[parameter]` of `kit` with those of `fixtures` that it takes."""
    name, _, chosen = test.removesuffix("]").partition("[")
    method = getattr(kit, name)
    values = {key: each for key, each in fixtures.items() if key in inspect.signature(method).parameters}
    found: list[dict[str, Any]] = [{}]
    for mark in getattr(method, "pytestmark", ()):
        if mark.name == "parametrize":
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
            rows = [row if len(names) > 1 else (row,) for row in mark.args[1]]
            found = [{**each, **dict(zip(names, row, strict=True))} for each in found for row in rows]
    wanted = [each for each in found if "-".join(map(str, each.values())) == chosen]
    assert len(wanted) == 1, f"no {test}: {[list(each.values()) for each in found]}"
    method(**values, **wanted[0])


def must_fail(kit: object, test: str, fixtures: Callable[[], Mapping[str, Any]], says: str) -> None:
    """Fail unless the test of the kit, or a fixture, fails, and says in one sentence what is wrong."""
    with pytest.raises((AssertionError, pytest.fail.Exception)) as failure:
        call(kit, test, fixtures())
    first = str(failure.value).partition("\nassert ")[0]
    assert says in first, first
    assert len(first) < 400, "a message is no dump"
