"""The files that a forge and an index read: licence, addresses, the CI's matrix, issue forms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.shown import blocks

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
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


def test_the_repositorys_address_stands_in_one_place() -> None:
    (address,) = re.findall(r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.*"),
        *(ROOT / "kvframework").rglob("*.py"),
    ]
    assert [str(page) for page in pages if page.is_file() and address.encode() in page.read_bytes()] == []


def test_the_forges_ci_runs_the_environments_of_tox() -> None:
    tox = (ROOT / "tox.ini").read_text()
    (full,) = re.findall(r"^ +full = (.*)$", tox, re.MULTILINE)
    rows = read(WORKFLOW)["jobs"]["tox"]["strategy"]["matrix"]["include"]
    # The layers are part of `types`.
    assert {row["env"] for row in rows} == {*full.split(", "), "survival"} - {"layers"}
    for row in rows:
        minor = re.search(r"py3(\d+)", row["env"])
        assert minor is None or row["python"] == f"3.{minor[1]}"


@pytest.mark.parametrize("form", [form for form in FORMS if form.name != "config.yml"], ids=lambda form: form.name)
def test_a_form_is_one(form: Path) -> None:
    content = read(form)
    assert content["name"]
    assert content["description"]
    for part in content["body"]:
        assert part["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert part["type"] == "markdown" or (part["id"] and part["attributes"]["label"])


@pytest.mark.parametrize("name", ["bug.yml", "slow.yml"])
def test_a_report_brings_what_the_machine_says_of_itself(name: str) -> None:
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / name).read_text()
    assert "`kvframework doctor --json" in text
    assert "`kvframework status --json`" in text


def test_contributors_get_commands_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    groups = re.findall(r"--group (\w+)", "\n".join(blocks(page, "bash")))
    package = (ROOT / "pyproject.toml").read_text()
    assert groups
    assert [group for group in groups if f"\n{group} = [" not in package] == []
    for module in re.findall(r"`python -m ([\w.]+)", page):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module
