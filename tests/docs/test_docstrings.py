"""Docstrings are plain English: the first line says what a thing is or does, and no phrase has to be decoded."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.prose import ROOT, UNCLEAR

OWNS = re.compile(r"\AOwns\b")
# Code in a docstring may use any name.
_CODE = re.compile(r"`[^`]*`")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, its classes and its functions, with their line numbers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


def unclear(source: str) -> list[int]:
    """The lines of docstrings with a phrase that `UNCLEAR` names. Most files have none anywhere and are not parsed."""
    if not UNCLEAR.search(source):
        return []
    return [line for line, text in docstrings(source) if UNCLEAR.search(_CODE.sub("", text))]


def owning(source: str) -> list[int]:
    """The lines of docstrings that begin with "Owns"."""
    if '"""Owns' not in source:
        return []
    return [line for line, text in docstrings(source) if OWNS.match(text)]


@pytest.mark.parametrize("folder", ["kvframework", "plugins", "benchmarks", "examples", "tests"])
def test_first_lines_say_what_a_thing_is(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert {str(file.relative_to(ROOT)): found for file in files if (found := owning(file.read_text()))} == {}


@pytest.mark.parametrize("folder", ["kvframework", "plugins", "benchmarks", "examples"])
def test_docstrings_are_plain(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert {str(file.relative_to(ROOT)): found for file in files if (found := unclear(file.read_text()))} == {}


def test_an_unclear_docstring_is_found_in_any_place() -> None:
    phrase, first = "nobody waits", "Owns"
    source = (
        f'"""{first} a thing."""\nclass A:\n    """`told` is a name."""\n    def f(self):\n        """{phrase}"""\n'
    )
    assert unclear(source) == [5]
    assert owning(source) == [1]
    assert unclear(f"told = 1  # {phrase}\n") == []
