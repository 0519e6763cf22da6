"""Every text says the install command that works today, which stands in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvframework.api import installing
from kvframework.api.installing import install_command, requirement
from tests.docs.install_commands import in_step
from tests.docs.prose import PAGES

ROOT = Path(__file__).resolve().parents[2]
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


def test_every_page_is_in_step() -> None:
    assert [
        str(page) for page in PAGES if page.name != "CHANGELOG.md" and in_step(page.read_text()) != page.read_text()
    ] == []


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
