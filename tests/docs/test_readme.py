"""The README's commands, TOML, figures and promises are what the project runs and has."""

from __future__ import annotations

import re
from pathlib import Path

import kvframework
from kvframework.config import ObserveConfig
from tests.docs.option_tables import readmes
from tests.docs.shown import blocks
from tests.support.whole_cli import whole_cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TESTS = blocks(README, "bash")[1]


def section(heading: str) -> str:
    return README.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_ci_runs_the_readmes_test_command() -> None:
    assert TESTS.strip() in (ROOT / ".ci" / "run").read_text().splitlines()


def test_two_commands_show_a_hit_rate() -> None:
    run = re.findall(r"`([^`]+)`", section("Watch it"))[0]
    assert run.split()[1] in whole_cli().commands
    assert f"<http://{ObserveConfig().listen}/>" in section("Watch it")


def test_what_it_says_of_itself_is_true() -> None:
    package = (ROOT / "pyproject.toml").read_text()
    minor = ".".join(kvframework.__version__.split(".")[:2])
    assert f"| | kvframework {minor} |" in README
    assert f"| kvframework | {minor} |" in (ROOT / "docs" / "comparison.md").read_text()
    assert f"| {minor}, the main branch | yes |" in (ROOT / "SECURITY.md").read_text()
    assert 'license = "Apache-2.0"' in package
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License\n")
    first, last = re.findall(r"Python 3\.(\d+) to 3\.(\d+)", README)[0]
    tested = re.findall(r"py3(\d+): py3\d+", (ROOT / "tox.ini").read_text())
    assert f'requires-python = ">=3.{first}"' in package
    assert (min(tested, key=int), max(tested, key=int)) == (first, last)


def test_python_blocks_compile() -> None:
    for page in (*(ROOT / "docs" / "engines").glob("*.md"), ROOT / "docs" / "plugins" / "tiers.md"):
        for code in blocks(page.read_text(), "python"):
            compile(code, page.name, "exec")


def test_every_plugin_has_a_readme_that_names_its_entry_points() -> None:
    found = readmes()
    assert sum(ROOT / "plugins" in readme.parents for readme in found) >= 7
    for readme, offers in found.items():
        for name in offers:
            assert name in readme.read_text(), (name, readme)
