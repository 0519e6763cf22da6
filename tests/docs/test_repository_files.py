"""The files that a forge and an index read: licence, addresses, the CI's matrix, issue forms."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvframework.api import installing
from kvframework.api.installing import install_command, requirement
from tests.docs.install_commands import in_step

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


# Every text says the install command that works today, which stands in one place.


SOURCES = [
    file
    for folder in ("kvframework", "plugins", "benchmarks/kvframework_bench", "examples")
    for file in sorted((ROOT / folder).rglob("*"))
    if file.suffix in (".py", ".md-tpl", ".toml-tpl", ".yml-tpl", ".ini-tpl") and file.name != "installing.py"
]
ON_AN_INDEX = {"kvframework": "kvframework", "kvframework-bench": "kvframework-bench"}


def test_no_source_spells_a_command_of_its_own() -> None:
    named = re.compile(r"pip install [^`\n]*(?:DIR-OF-CLONE|(?<![\w./-])\"?kvframework(?:\[|\"|`| |$))", re.MULTILINE)
    assert [str(file.relative_to(ROOT)) for file in SOURCES if named.search(file.read_text())] == []


def test_the_day_of_the_release_is_one_change(monkeypatch: pytest.MonkeyPatch) -> None:
    page = '`pip install DIR-OF-CLONE` or\npip install "DIR-OF-CLONE[s3,demo-trained]" # or DIR-OF-CLONE/benchmarks\n'
    assert in_step(page) == page
    monkeypatch.setattr(installing, "SOURCES", ON_AN_INDEX)
    released = in_step(page)
    assert released == (
        '`pip install kvframework` or\npip install "kvframework[s3,demo-trained]" # or kvframework-bench\n'
    )
    assert in_step(released) == released
    assert install_command("redis") == 'pip install "kvframework[redis]"'


def test_a_requirement_is_quoted_where_a_shell_needs_it() -> None:
    assert requirement() == installing.SOURCES["kvframework"]
    assert requirement("a", "b").startswith('"')
    assert requirement("plot", distribution="kvframework-bench").endswith('/benchmarks[plot]"')
