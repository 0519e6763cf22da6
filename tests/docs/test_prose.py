"""Pages and docstrings are plain English, and pages can be read in a terminal."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.prose import PAGES, ROOT, UNCLEAR, WIDTH, prose, rewrapped, too_long, wrapped

# The map of the rooms is written by hand, picture and all, and checked by a test of its own.
CHECKED = [page for page in PAGES if page != ROOT / "docs" / "architecture.md"]


@pytest.mark.parametrize("page", CHECKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_plain_and_its_lines_end_in_time(page: Path) -> None:
    text = page.read_text()
    long = [number for number, line in prose(text) if too_long(line)]
    assert long == [], f"lines of more than {WIDTH} columns: python -m tests.docs.prose {page.relative_to(ROOT)}"
    tables = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.startswith("|")]
    assert [(number, line) for number, line in (*prose(text), *tables) if UNCLEAR.search(line)] == []


def test_a_long_line_and_an_unclear_one_are_found() -> None:
    page = f"# {'x ' * 60}\n{'word ' * 30}\n```\n{'code ' * 30}\n```\n| {'cell ' * 30} |\nnobody was told\n"
    assert [number for number, line in prose(page) if too_long(line)] == [2]
    assert [number for number, line in prose(page) if UNCLEAR.search(line)] == [7]


def test_a_wrapped_item_hangs_and_keeps_its_code() -> None:
    item = "* " + "word " * 19 + "`code with spaces` and a [link](https://example.com/" + "x" * 120 + ") at its end"
    lines = wrapped(item).splitlines()
    assert lines[0].startswith("* word")
    assert all(line.startswith("  ") for line in lines[1:])
    assert any("`code with spaces`" in line for line in lines)
    assert wrapped("\n".join(lines)) == wrapped(item)
    assert not any(map(too_long, lines))


def test_a_page_is_rewrapped_around_its_code_and_tables() -> None:
    kept = f"# {'x ' * 60}\n\n```\n{'code ' * 30}\n```\n\n| {'cell ' * 30} |\n"
    page = f"{kept}\n{'word ' * 30}\nand more\n\n* {'item ' * 25}\n* another\n"
    new = rewrapped(page)
    assert new.startswith(kept)
    assert not any(too_long(line) for _, line in prose(new))
    assert new.split() == page.split()
    assert "\n* another\n" in new
    assert rewrapped(new) == new


def unclear(source: str) -> list[int]:
    """The lines of docstrings with a phrase that `UNCLEAR` names; code in them may use any name. Most files have none
    anywhere and are not parsed."""
    if not UNCLEAR.search(source):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = {
        node.body[0].lineno: ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and node.body
    }
    return [line for line, text in texts.items() if UNCLEAR.search(re.sub(r"`[^`]*`", "", text))]


@pytest.mark.parametrize("folder", ["kvframework", "plugins", "benchmarks", "examples"])
def test_docstrings_are_plain(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert {str(file.relative_to(ROOT)): found for file in files if (found := unclear(file.read_text()))} == {}


def test_an_unclear_docstring_is_found_in_any_place() -> None:
    phrase = "nobody waits"
    source = f'"""A thing."""\nclass A:\n    """`told` is a name."""\n    def f(self):\n        """{phrase}"""\n'
    assert unclear(source) == [5]
    assert unclear(f"told = 1  # {phrase}\n") == []
