"""The error codes: each class of `KVFrameworkError` that has one, from its docstring and the calls that make it. Read
by `ast`, because some of the modules import torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TOPS = (ROOT / "kvframework", ROOT / "plugins", ROOT / "benchmarks" / "kvframework_bench")
CORE = ROOT / "kvframework" / "errors.py"
ADVICE = "What to do: "
HEAD = """\
Every error of kvframework has a code. Its text names the place, the fact, the accepted values and one
hint:

```text
[config.field] kvf.toml: [l1]: unknown key 'capacty'
  expected: capacity, eviction, ghosts, high_watermark, huge_pages, keep, low_watermark, numa, use
  hint: did you mean 'capacity'?
```

A code never changes its meaning. Error frames, logs, command output and the status
(`messaging.counters.errors.CODE`) use it. A code that a client does not know becomes `remote`, with
the server's text. The code of a plugin's error begins with the name of its module.
"""


class Code(NamedTuple):
    """A class with a code. `raised` are the packages that make one."""

    code: str
    name: str
    meaning: str
    advice: str
    raised: list[str]
    is_base: bool
    in_core: bool


def codes() -> list[Code]:
    """Return all codes, those of the core first, each file's in its order."""
    files = [file for top in TOPS for file in sorted(top.rglob("*.py"), key=lambda file: (file != CORE, file))]
    trees = {file: ast.parse(file.read_text()) for file in files}
    classes = [(file, node) for file, tree in trees.items() for node in tree.body if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base) for _, node in classes for base in node.bases}
    made: dict[str, set[str]] = {}
    for file, tree in trees.items():
        place = file.relative_to(ROOT).with_suffix("").parts
        is_core = place[0] == "kvframework"
        package = ".".join(place[:2]) if is_core else next((part for part in place if part[:2] == "kv"), place[1])
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                made.setdefault(ast.unparse(node.func).removeprefix("errors."), set()).add(package)
    return [
        Code(code, node.name, *_told(node), sorted(made.get(node.name, ())), node.name in bases, file == CORE)
        for file, node in classes
        if (code := _code(node)) is not None
    ]


def table() -> str:
    """Return the table of all codes. Each row has the code as its anchor."""
    return "\n".join([HEAD, "| code | class | meaning | what to do | raised in |", "|---|---|---|---|---|", *_rows()])


def anchors() -> set[str]:
    return {each.code for each in codes()}


def _rows() -> list[str]:
    rows = []
    for each in codes():
        name = f"[`{each.name}`](#kvframework.errors.{each.name})" if each.in_core else f"`{each.name}`"
        raised = ", ".join(f"`{package}`" for package in each.raised)
        raised = raised or ("never: catches the others" if each.is_base else "made from a peer's answer")
        cells = (f'<a id="{each.code}"></a>`{each.code}`', name, each.meaning, _linked(each.advice), raised)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return rows


def _linked(text: str) -> str:
    return re.sub(r"`docs/([\w/]+\.md)`", r"[\1](../\1)", text)


def _code(node: ast.ClassDef) -> str | None:
    """Return the code that a class declares; the base of all has it as an attribute."""
    given = [each.value for each in node.keywords if each.arg == "code"]
    if node.name == "KVFrameworkError":
        given = [
            each.value for each in node.body if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == "code"
        ]
    return next((str(each.value) for each in given if isinstance(each, ast.Constant)), None)


def _told(node: ast.ClassDef) -> tuple[str, str]:
    """Return the docstring's first paragraph, and the one that says what to do."""
    paragraphs = [" ".join(each.split()) for each in (ast.get_docstring(node) or "").split("\n\n")]
    advice = [each.removeprefix(ADVICE) for each in paragraphs[1:] if each.startswith(ADVICE)]
    return paragraphs[0], "".join(each[0].upper() + each[1:] for each in advice)
