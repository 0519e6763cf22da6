"""What a plugin's author may rely on is on file: whoever changes it sees so, and says by the version what it means."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.api import surface
from tests.docs.shown import blocks

ROOT = Path(__file__).resolve().parents[3]
# Every name that these define is public.
WITHOUT_ALL = {"kvframework.errors", "kvframework.api.hookspecs", "kvframework.status"}


# What authors of plugins read as examples: not the tools, which know more of the core.
OURS = [folder for folder in sorted((ROOT / "plugins").iterdir()) if folder.name != "tools"]
TEMPLATES = ROOT / "plugins" / "tools" / "dev" / "kvf_dev" / "scaffold" / "templates"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ast.unparse writes lambdas and tuples otherwise")
def test_the_public_surface_is_the_one_on_file() -> None:
    before, now = surface.FILE.read_text().splitlines(), surface.surface().splitlines()
    new = "".join(f"\n  + {line.strip()}" for line in now if line not in before)
    gone = "".join(f"\n  - {line.strip()}" for line in before if line not in now)
    assert before == now, (
        f"the public surface has changed:{gone}{new}\n"
        f"What goes or changes needs a new major, what is added a new minor (docs/plugins/compatibility.md): set "
        f"API_VERSION, then run {surface.RENEW}"
    )


def test_it_has_every_module_that_authors_are_shown_to_import() -> None:
    shown = [ROOT / "docs" / "plugins", ROOT / "examples", TEMPLATES, *OURS]
    texts = [
        file.read_text()
        for folder in shown
        for file in folder.rglob("*")
        if file.suffix in (".md", ".py", ".py-tpl") and "kvf_devices" not in file.parts
    ]
    found = {
        name
        for text in texts
        for name in re.findall(r"^ *(?:from|import) ((?:kvframework|kvf_dev|kvf_devices)\b[\w.]*)", text, re.MULTILINE)
    }
    assert {"kvframework.api.tier", "kvf_dev.testing.transport"} <= found <= {*surface.MODULES, *surface.SIMULATOR}


def imported(text: str) -> Iterator[tuple[str, str]]:
    """Module and name of every import of this package in a program, those in functions and for the type checker too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("kvframework", "kvf_dev")):
            yield from ((node.module or "", alias.name) for alias in node.names)


def programs() -> Iterator[tuple[str, str]]:
    """What authors read as examples: our plugins, distributions, templates, guides, and the examples of hooks."""
    for folder in (*OURS, ROOT / "examples", TEMPLATES):
        for file in sorted(folder.rglob("*")):
            if file.name.endswith((".py", ".py-tpl")):
                yield str(file.relative_to(ROOT)), file.read_text()
    for page in sorted((ROOT / "docs" / "plugins").glob("*.md")):
        for code in blocks(page.read_text(), "python"):
            yield str(page.relative_to(ROOT)), textwrap.dedent(code)


# Of the package itself, and of parts that stand above the plugins' API.
MORE = {("kvframework", "__version__")}


def test_what_authors_read_imports_public_names_only() -> None:
    """Our own plugins need nothing that another author's may not use."""
    importable = (*surface.MODULES, *surface.SIMULATOR)
    public = {(module, name) for module in importable for name in surface.public(module)} | MORE
    modules = {tuple(module.rsplit(".", 1)) for module in importable}
    private = [
        f"{place}: {module}.{name}"
        for place, text in programs()
        for module, name in imported(text)
        if f"/{module.partition('.')[0]}/" not in place  # its own parts
        if (module, name) not in public | modules
    ]
    assert not private, "\n".join(private)


def test_packages_say_what_is_public() -> None:
    """All that is neither in one of these modules nor in its `__all__` is internal."""
    without = {module for module in surface.MODULES if "\n__all__ = " not in surface.source(module)}
    assert without <= WITHOUT_ALL, "give each of them an `__all__`"


CHANGES = {
    "a parameter": (
        "kvframework.api.tier",
        "def ping(self, *, deadline: float)",
        "def ping(self, *, deadline: float, hard: bool)",
    ),
    "a type": ("kvframework.api.tier", "used_bytes: int", "used_bytes: float"),
    "a default": ("kvframework.api.requests", "deadline_s: float = 5.0", "deadline_s: float = 6.0"),
    "a bound": ("kvf_devices.driver", "Meta(ge=1, desc", "Meta(ge=2, desc"),
    "a method that must be there": ("kvframework.api.eviction", "def on_access", "def on_use"),
    "the order of fields": (
        "kvframework.api.transport",
        "view: memoryview\n    address: int",
        "address: int\n    view: memoryview",
    ),
    "a base": ("kvframework.errors", "class DeviceLost(DeviceError,", "class DeviceLost(KVFrameworkError,"),
    "a code": ("kvframework.errors", '"device.lost"', '"device.gone"'),
    "how a struct is made": ("kvframework.api.plugin", "frozen=True, forbid_unknown_fields=True", "frozen=True"),
    "a hook": ("kvframework.api.hookspecs", "def kvf_codecs", "def kvf_codec"),
    "an attribute": ("kvframework.api.transport", "self.outcome = outcome", "self._outcome = outcome"),
    "a kit's setting": (
        "kvf_dev.testing.tier.kit",
        "patience_s: ClassVar[float] = 20.0",
        "patience_s: ClassVar[float] = 2.0",
    ),
    "a kit's fixture": ("kvf_dev.testing.layout", "def subject(", "def layout_subject("),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_seen(*CHANGES[what], monkeypatch)


UNSEEN = {
    "a description": ("kvf_devices.driver", "bytes of one launch", "what one launch has"),
    "a docstring": ("kvframework.api.futures", '"""Return the value, waiting', '"""The result, waiting'),
    "a private name": ("kvframework.api.futures", "_callbacks", "_waiting"),
    "a test of a kit": (
        "kvf_dev.testing.layout",
        "def test_every_layer_is_in_one_group",
        "def test_layers_are_in_a_group",
    ),
}


@pytest.mark.parametrize("what", UNSEEN)
def test_what_is_no_contract_may_change(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_seen(*UNSEEN[what], monkeypatch)


def is_seen(module: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the surface is another one when the module has `new` for `old`."""
    before, source = surface.surface(), surface.source(module)
    assert old in source
    monkeypatch.setitem(surface._read, module, surface.flat(ast.parse(source.replace(old, new))))
    return surface.surface() != before
