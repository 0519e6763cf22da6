"""The checks of a plugin's source, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kvf_dev.inspection.problems import Problem, problem

_PUBLIC = (
    "kvframework.api",
    "kvframework.client",
    "kvframework.errors",
    "kvframework.status",
    "kvf_dev.testing",
)
_MOST_FILES = 500


class SourceFile(NamedTuple):
    """One file of the package. `module` is its name for an import."""

    module: str
    path: Path
    tree: ast.Module


def read_sources(module: str) -> list[SourceFile]:
    """The files of the package that `module` belongs to, or its one file; none without source. Blocking."""
    root = module.partition(".")[0]
    spec = find_spec(root)
    if spec is None:
        return []
    found: list[SourceFile] = []
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*.py"))[:_MOST_FILES]:
            parts = path.relative_to(folder).with_suffix("").parts
            found += _parsed(".".join((root, *(part for part in parts if part != "__init__"))), path)
    if not spec.submodule_search_locations and spec.origin and spec.origin.endswith(".py"):
        found += _parsed(root, Path(spec.origin))
    return found


def _parsed(module: str, path: Path) -> list[SourceFile]:
    try:
        return [SourceFile(module, path, ast.parse(path.read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return []  # not a source file of this Python: the import reports more


def import_problems(sources: list[SourceFile]) -> Iterator[Problem]:
    """Imports of modules that a release may change without notice."""
    for source in sources:
        for node in ast.walk(source.tree):
            for name in _imported(node):
                if _internal(name):
                    yield problem(
                        "internal-import",
                        f"{source.module}, line {getattr(node, 'lineno', 0)}",
                        f"it imports {name}",
                        expected=f"imports of {', '.join(_PUBLIC)} only",
                        hint="the rest changes without notice",
                    )


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        if node.module == "kvframework":
            yield from (f"kvframework.{alias.name}" for alias in node.names)
        else:
            yield node.module


def _internal(name: str) -> bool:
    if name in ("kvframework", "kvframework.__version__") or not name.startswith("kvframework."):
        return False
    return not any(name == public or name.startswith(f"{public}.") for public in _PUBLIC)


def classes_of(sources: list[SourceFile], contract: str) -> Iterator[tuple[str, str]]:
    """Module and name of the classes at the top of a module that name `contract` among their bases."""
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and contract in {_last(base) for base in node.bases}:
                yield source.module, node.name


def _last(base: ast.expr) -> str:
    if isinstance(base, ast.Subscript):
        base = base.value
    return base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
