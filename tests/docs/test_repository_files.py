"""The files that a forge and an index read: licence, addresses, the CI's matrix, issue forms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.shown import blocks

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"
DISTRIBUTIONS = (ROOT / "pyproject.toml", ROOT / "benchmarks" / "pyproject.toml")


def read(file: Path) -> Any:
    return pytest.importorskip("yaml", reason="there is no PyYAML").safe_load(file.read_text())


@pytest.mark.parametrize("package", DISTRIBUTIONS, ids=lambda package: package.parent.name)
def test_every_distribution_carries_the_licence(package: Path) -> None:
    assert 'license = "Apache-2.0"\nlicense-files = ["LICENSE"]\n' in package.read_text()
    text = package.with_name("LICENSE").read_text()
    assert text == (ROOT / "LICENSE").read_text()
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_forges_ci_runs_the_environments_of_tox() -> None:
    tox = (ROOT / "tox.ini").read_text()
    (full,) = re.findall(r"^ +full = (.*)$", tox, re.MULTILINE)
    rows = read(WORKFLOW)["jobs"]["tox"]["strategy"]["matrix"]["include"]
    # The layers are part of `types`.
    assert {row["env"] for row in rows} == {*full.split(", "), "survival"} - {"layers"}
    for row in rows:
        minor = re.search(r"py3(\d+)", row["env"])
        assert minor is None or row["python"] == f"3.{minor[1]}"


def test_contributors_get_commands_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    groups = re.findall(r"--group (\w+)", "\n".join(blocks(page, "bash")))
    package = (ROOT / "pyproject.toml").read_text()
    assert groups
    assert [group for group in groups if f"\n{group} = [" not in package] == []
    for module in re.findall(r"`python -m ([\w.]+)", page):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module
