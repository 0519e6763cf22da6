"""Reads the public surface out of the sources, and writes it: `python -m tests.core.api.surface` renews `surface.txt`.

One line a name, one line a member, so that a diff shows what a plugin's author would notice. Read by `ast`, not by
importing: it is the same on every interpreter and needs neither torch nor pytest.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import kvf_dev
import kvf_devices
import kvf_helper_tier
import kvframework
from kvframework.api.plugin import API_VERSION

PACKAGE = Path(kvframework.__file__).parent
KITS = Path(kvf_dev.__file__).parent
DEVICES = Path(kvf_devices.__file__).parent
HELPER = Path(kvf_helper_tier.__file__).parent
FILE = Path(__file__).parent / "surface.txt"
RENEW = "python -m tests.core.api.surface"
# What an author may import: of these modules the names in `__all__`, of one without it every public name that it
# defines itself. In `kvframework.api` a module is public if it has an `__all__`.
MODULES = (
    "kvframework.errors",
    "kvframework.api.hookspecs",
    *(
        f"kvframework.api.{file.stem}".removesuffix(".__init__")
        for file in sorted((PACKAGE / "api").glob("*.py"), key=lambda file: (file.stem == "__init__", file.stem))
        if "\n__all__ = " in file.read_text()
    ),
    "kvframework.client",
    "kvframework.status",
    "kvf_devices",
    "kvf_dev.testing",
    "kvf_dev.testing.faults",
    "kvf_dev.testing.layout",
    "kvf_dev.testing.tier",
    "kvf_dev.testing.transport",
)
# What an author may import besides, to develop against: it may change with any minor release.
SIMULATOR = ("kvf_dev.testing.accelerator", "kvf_dev.testing.accelerator.rig")
METHOD = re.compile(r"  (?!.*fixture )(\w+ )*\w+\.\w+\(")
SPECIAL = {"__init__", "__call__", "__int__", "__len__"}
FLAGS = {
    "abstractmethod": "abstract",
    "property": "property",
    "classmethod": "class",
    "staticmethod": "static",
    "fixture": "fixture",
}


class Definition(NamedTuple):
    """Where a name is made: the module, and its statement there."""

    module: str
    node: ast.stmt


def surface() -> str:
    names = {module: public(module) for module in MODULES}
    known = {definition for each in names.values() for definition in each.values()}
    lines = [f"# The public surface of plugin API {'.'.join(map(str, API_VERSION))}. Renew with {RENEW}"]
    shown: set[Definition] = set()
    for module, defined in names.items():
        lines += ["", f"[{module}]"]
        again = sorted(name for name in defined if defined[name] in shown)
        lines += [f"as above: {', '.join(again)}"] if again else []
        for name in sorted(defined.keys() - again):
            lines += described(name, defined[name], known)
        shown |= set(defined.values())
    return "\n".join(lines) + "\n"


def source(module: str) -> str:
    top, *parts = module.split(".")
    folders = {"kvframework": PACKAGE, "kvf_dev": KITS, "kvf_devices": DEVICES, "kvf_helper_tier": HELPER}
    place = folders[top].joinpath(*parts)
    return (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()


def flat(tree: ast.Module) -> list[ast.stmt]:
    """The statements of a module, those for the type checker too."""
    return [each for node in tree.body for each in (node.body if isinstance(node, ast.If) else [node])]


def statements(module: str) -> list[ast.stmt]:
    if module not in _read:
        _read[module] = flat(ast.parse(source(module)))
    return _read[module]


_read: dict[str, list[ast.stmt]] = {}


def public(module: str) -> dict[str, Definition]:
    """The public names of a module, and where each is made."""
    for node in statements(module):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {name: find(module, name) for name in ast.literal_eval(node.value)}
    made = {name for node in statements(module) for name in targets(node) if not name.startswith("_")}
    return {name: find(module, name) for name in made}


def targets(node: ast.stmt) -> list[str]:
    """The names that a statement makes itself; an import makes none."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []


def find(module: str, name: str) -> Definition:
    """The statement that makes a name, through all imports."""
    for node in statements(module):
        if name in targets(node):
            return Definition(module, node)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    if node.module.startswith(("kvframework", "kvf_dev", "kvf_helper_tier")):
                        return find(node.module, alias.name)
                    return Definition(module, node)
    raise LookupError(f"{module} makes no {name}")


def described(name: str, definition: Definition, known: set[Definition]) -> Iterator[str]:
    node = definition.node
    if isinstance(node, ast.ClassDef):
        bases = [ast.unparse(each) for each in node.bases if hidden_base(definition, each, known) is None]
        bases += [ast.unparse(each) for each in node.keywords]
        manager = (
            " with" if any(isinstance(each, ast.FunctionDef) and each.name == "__enter__" for each in node.body) else ""
        )
        yield f"class {name}({', '.join(bases)}){decorators(node)}{manager}"
        promised = set(inherited(definition, known))
        for line in dict.fromkeys(members(name, definition, known)):
            if bare(line, name) not in promised:
                yield line
    elif isinstance(node, ast.FunctionDef):
        yield f"def {name}{signature(node)}{decorators(node)}"
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        yield text(node)
    else:
        yield f"{name}: {ast.unparse(node)}"


def members(name: str, definition: Definition, known: set[Definition]) -> Iterator[str]:
    """The members of a class, those of bases that are not public themselves too."""
    node = definition.node
    assert isinstance(node, ast.ClassDef)
    own = tuple(f"  {name}.{each.name}(" for each in node.body if isinstance(each, ast.FunctionDef))
    for base in node.bases:
        hidden = hidden_base(definition, base, known)
        if hidden is not None:
            # Of the parts of a kit its fields and fixtures are for authors.
            kit = hidden.module.startswith("kvf_dev.testing")
            lines = (line for line in members(name, hidden, known) if not line.startswith(own))
            yield from (line for line in lines if not (kit and METHOD.match(line)))
    # Fields in their order, which is that of positional arguments and of what travels as an array.
    for each in node.body:
        if isinstance(each, (ast.Assign, ast.AnnAssign)) and shown(targets(each)[0]):
            yield f"  {name}.{text(each)}"
    for each in sorted((each for each in node.body if isinstance(each, ast.FunctionDef)), key=lambda each: each.name):
        if shown(each.name):
            flag = "".join(f"{word} " for mark, word in FLAGS.items() if mark in decorators(each))
            yield f"  {flag}{name}.{each.name}{signature(each)}"
        if each.name == "__init__":
            yield from attributes(name, each)


def inherited(definition: Definition, known: set[Definition]) -> Iterator[str]:
    """The members that public bases list: a class that only implements them has nothing to add."""
    assert isinstance(definition.node, ast.ClassDef)
    for base in definition.node.bases:
        inner = base.value if isinstance(base, ast.Subscript) else base
        try:
            found = find(definition.module, ast.unparse(inner))
        except LookupError:
            continue
        if found in known and isinstance(found.node, ast.ClassDef):
            yield from (bare(line, "") for line in members("", found, known))
            yield from inherited(found, known)


def bare(line: str, name: str) -> str:
    """A member's line without its class, and without a mark that no subclass repeats."""
    return line.replace("  abstract ", "  ").replace(f" {name}.", " .", 1)


def hidden_base(definition: Definition, base: ast.expr, known: set[Definition]) -> Definition | None:
    """The definition of a base class of ours that is not public itself."""
    inner = base.value if isinstance(base, ast.Subscript) else base
    try:
        found = find(definition.module, ast.unparse(inner))
    except LookupError:
        return None
    return found if found not in known and isinstance(found.node, ast.ClassDef) else None


def attributes(name: str, init: ast.FunctionDef) -> Iterator[str]:
    """What `__init__` sets."""
    for node in ast.walk(init):
        found = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in found:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and shown(target.attr):
                yield f"  {name}.{target.attr}"


def shown(name: str) -> bool:
    """The tests of a kit are none of it: a minor may add some."""
    return name in SPECIAL or not name.startswith(("_", "test_"))


def text(node: ast.stmt) -> str:
    """A statement in one line, without the descriptions in it, which are no contract."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            call.keywords = [each for each in call.keywords if each.arg != "description"]
    return ast.unparse(node)


def signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}"


def decorators(node: ast.ClassDef | ast.FunctionDef) -> str:
    return "".join(f" @{ast.unparse(each)}" for each in node.decorator_list)


if __name__ == "__main__":
    FILE.write_text(surface())
    print(FILE)
