"""Reads out of the sources what is announced to go: every call of `kvframework.deprecation.deprecated`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvframework.deprecation import deprecated

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "kvframework", ROOT / "plugins")


def announced(folders: Sequence[Path] = SOURCES) -> list[deprecated]:
    """All of them, what goes first in front."""
    found = [each for folder in folders for file in sorted(folder.rglob("*.py")) for each in _in(file)]
    return sorted(found, key=lambda each: (number(each.gone), each.what))


def due(release: str, folders: Sequence[Path] = SOURCES) -> list[deprecated]:
    """What a release may not hold any more."""
    return [each for each in announced(folders) if number(release) >= number(each.gone)]


def number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _in(file: Path) -> Iterator[deprecated]:
    text = file.read_text()
    for node in ast.walk(ast.parse(text)) if "deprecated(" in text else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "deprecated":
            yield deprecated(
                *map(ast.literal_eval, node.args),
                **{str(each.arg): ast.literal_eval(each.value) for each in node.keywords},
            )
