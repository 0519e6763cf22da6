"""No file of the project turns data into code: no pickle, marshal or shelve, no eval and no exec."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.docs.prose import ROOT

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
BUILTINS = {"eval", "exec"}


def forbidden(source: str) -> Iterator[tuple[int, str]]:
    """The forbidden names of a module, with their lines. `model.eval()` is a method."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names if each.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.partition(".")[0] in MODULES:
                yield node.lineno, module
            elif module == "builtins":
                yield from ((node.lineno, each.name) for each in node.names if each.name in BUILTINS)
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in {f"builtins.{name}" for name in BUILTINS}:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # The program of another process, too.
            yield from ((node.lineno, word) for word in _imported(node.value))


def _imported(text: str) -> Iterator[str]:
    for line in text.replace(";", "\n").splitlines():
        words = line.replace(",", " ").split()
        if words[:1] == ["import"] or (words[:1] == ["from"] and words[2:3] == ["import"]):
            yield from (word for word in words[1:] if word in MODULES)


def concerns(source: str) -> bool:
    """Whether it is worth to parse it."""
    return any(word in source for word in MODULES | BUILTINS)


@pytest.mark.parametrize("folder", ["kvframework", "plugins", "benchmarks", "examples", "tests"])
def test_no_file_turns_data_into_code(folder: str) -> None:
    files = [file for pattern in ("*.py", "*.py-tpl") for file in sorted((ROOT / folder).rglob(pattern))]
    assert files
    found = {}
    for file in files:
        source = file.read_text()
        if concerns(source) and (lines := list(forbidden(source))):
            found[str(file.relative_to(ROOT))] = lines
    assert found == {}


def test_it_is_found_in_any_place() -> None:
    source = """\
IMPORT os, pickle
from marshal IMPORT loads
def f(model):
    IMPORT shelve as s
    model.eval()
    return eval
PROGRAM = '''
IMPORT json, pickle
'''
IMPORT builtins
builtins.exec("1")
from builtins IMPORT eval as read
""".replace("IMPORT", "import")
    assert sorted(forbidden(source)) == [
        (1, "pickle"),
        (2, "marshal"),
        (4, "shelve"),
        (6, "eval"),
        (7, "pickle"),
        (11, "exec"),
        (12, "eval"),
    ]
