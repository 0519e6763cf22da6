"""Runs the kit in a pytest of its own, outside of the repository, with the installed package only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

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
