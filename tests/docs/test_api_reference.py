"""The reference has every public module, and every public class, function and method has a docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.core.api import surface
from tests.docs.api_reference import REFERENCE

MODULES = tuple(module for _, modules in REFERENCE.values() for module in modules)
Defined = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_every_public_module_is_on_one_page() -> None:
    assert sorted(MODULES) == sorted({*surface.MODULES, *surface.SIMULATOR, "kvframework.wire.messages"})


def undocumented(module: str) -> Iterator[str]:
    """Yield the public names of a module without a docstring. An overriding method has that of what it overrides."""
    if ast.get_docstring(ast.parse(surface.source(module))) is None:
        yield module
    for name, definition in surface.public(module).items():
        if isinstance(definition.node, Defined):
            if ast.get_docstring(definition.node) is None:
                yield name
            if isinstance(definition.node, ast.ClassDef) and not _overrides(definition.node):
                yield from (f"{name}.{method}" for method in _bare(definition.node))


def _overrides(node: ast.ClassDef) -> bool:
    """Whether methods may override others, whose docstrings they have."""
    return any(ast.unparse(base).partition("[")[0] not in ("ABC", "Generic", "Protocol") for base in node.bases)


def _bare(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        is_public = isinstance(each, Defined) and not each.name.startswith(("_", "test_"))
        if isinstance(each, Defined) and is_public and ast.get_docstring(each) is None:
            if ast.unparse(each.body) == "...":  # of a protocol, whose docstring describes them all
                continue
            decorators = {ast.unparse(decorator) for decorator in each.decorator_list}
            if not any(name.endswith((".setter", "overload", "fixture")) for name in decorators):
                yield each.name


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    assert list(undocumented(module)) == []
