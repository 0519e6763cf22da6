"""Makes docs/errors.md out of the sources: every class of `KVFrameworkError` with a code, its docstring, where it is
raised. Read by `ast`: some of the modules import torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

from tests.docs.prose import wrapped

ROOT = Path(__file__).resolve().parents[2]
TOPS = (ROOT / "kvframework", ROOT / "plugins", ROOT / "benchmarks" / "kvframework_bench")
FILES = [file for top in TOPS for file in sorted(top.rglob("*.py"))]
TITLES = {
    "error": "All",
    "remote": "From a peer",
    "config": "Configuration",
    "plugin": "Plugins",
    "protocol": "The wire",
    "request": "Requests",
    "run": "Running",
    "storage": "Storage",
    "device": "Devices",
    "scaffold": "kvframework new",
    "bench": "kvframework bench",
    "demo": "kvframework demo",
}
ADVICE = "What to do: "
HEAD = """\
# Error codes

Every error of kvframework has a code, and names the fact, the place, what is available and one
hint:

```text
[config.field] kvf.toml: [l1]: unknown key 'capacty'
  available: capacity, eviction, ghosts, high_watermark, huge_pages, keep, low_watermark, numa, use
  hint: did you mean 'capacity'?
```

A code never changes its meaning. It travels in error frames, is counted in
`messaging.counters.errors.CODE`, and appears in logs and in the output of commands. All classes
derive from `kvframework.errors.KVFrameworkError`, and from the builtins named here. A code of a
newer peer that this release does not know becomes `remote` and keeps its text. The codes of a
plugin's own errors begin with the name of its module.
"""


class Code(NamedTuple):
    """One class with a code of its own. `raised` are the packages that make one; `bases` as they stand there."""

    code: str
    name: str
    bases: list[str]
    meaning: str
    advice: str
    raised: list[str]
    is_base: bool


def codes() -> list[Code]:
    """All of them, by group in the order of the titles, each group in the order of its file."""
    trees = {file: ast.parse(file.read_text()) for file in FILES}
    classes = [node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base) for node in classes for base in node.bases}
    made: dict[str, set[str]] = {}
    for file, tree in trees.items():
        place = file.relative_to(ROOT).with_suffix("").parts
        package = ".".join(place[:2]) if place[0] == "kvframework" else place[1]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                made.setdefault(node.func.id, set()).add(package)
    found = [
        Code(
            code,
            node.name,
            [ast.unparse(base) for base in node.bases],
            *_told(node),
            sorted(made.get(node.name, ())),
            node.name in bases,
        )
        for node in classes
        for code in [_code(node)]
        if code is not None
    ]
    order = list(TITLES)
    return sorted(found, key=lambda each: (*_rank(each.code, order),))


def page() -> str:
    parts, last = [HEAD], ""
    for each in codes():
        group = each.code.partition(".")[0]
        if group != last:
            parts.append(f"## {TITLES.get(group, group)}\n")
            last = group
        parts.append(_entry(each))
    return "\n".join(parts)


def _entry(each: Code) -> str:
    kin = ", ".join(f"`{base}`" for base in each.bases)
    raised = f"raised in {', '.join(f'`{package}`' for package in each.raised)}"
    if not each.raised:
        raised = "never raised itself: a name to catch the others by" if each.is_base else "made from a peer's answer"
    advice = "\n" + wrapped(f"*{ADVICE.strip()}* {_linked(each.advice)}") + "\n" if each.advice else ""
    name = wrapped(f"`{each.name}` ({kin}), {raised}.")
    return f"### `{each.code}`\n{name}\n\n{wrapped(_linked(each.meaning))}\n{advice}"


def _linked(text: str) -> str:
    return re.sub(r"`docs/([\w/]+\.md)`", r"[\1](\1)", text)


def _code(node: ast.ClassDef) -> str | None:
    """The code that an error's class has of its own; that of the base of all is an attribute."""
    given = [each.value for each in node.keywords if each.arg == "code"]
    if node.name == "KVFrameworkError":
        given = [
            each.value for each in node.body if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == "code"
        ]
    return next((str(each.value) for each in given if isinstance(each, ast.Constant)), None)


def _told(node: ast.ClassDef) -> tuple[str, str]:
    """The first paragraph of the docstring, and the one that says what to do."""
    paragraphs = [" ".join(each.split()) for each in (ast.get_docstring(node) or "").split("\n\n")]
    advice = [each.removeprefix(ADVICE) for each in paragraphs[1:] if each.startswith(ADVICE)]
    return paragraphs[0], "".join(each[0].upper() + each[1:] for each in advice)


def _rank(code: str, order: list[str]) -> tuple[int, str]:
    group = code.partition(".")[0]
    return (order.index(group), "") if group in order else (len(order), group)
