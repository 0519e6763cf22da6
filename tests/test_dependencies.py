"""The environment that tox says it made is the one that was made."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest

CONSTRAINTS = os.environ.get("KVFRAMEWORK_TEST_CONSTRAINTS", "")


@pytest.mark.skipif(not CONSTRAINTS, reason="only the environment of the lowest dependencies")
def test_the_lowest_dependencies_were_really_resolved() -> None:
    pins = re.findall(r"^([\w-]+)==(\S+)$", Path(CONSTRAINTS).read_text(), re.MULTILINE)
    assert pins
    assert {name: version(name) for name, _ in pins} == dict(pins)


def test_the_lowest_constraints_are_what_the_project_admits() -> None:
    root = Path(__file__).resolve().parents[1]
    project = (root / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert needed
    floors = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', needed[1]))
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (root / "constraints-lowest.txt").read_text(), re.MULTILINE))
    assert floors.keys() <= pins.keys()
    for name, floor in floors.items():
        assert f"{pins[name]}.".startswith(f"{floor}."), name
