"""What a plugin's author may rely on is on file: whoever changes it sees so, and says by the version what it means. How
users write what a request says of the future of its KV: what is read, and what is refused, by name."""

from __future__ import annotations

import ast
import math
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.keys import (
    MAX_DURATION_S,
    MAX_PROMISE_S,
    MAX_RETAINS,
    PRIORITY,
    SOON_S,
    CacheKey,
    Retain,
    retain_of,
)
from kvframework.errors import InvalidPayload, RequestError
from kvframework.wire import messages as m
from kvframework.wire.frames import decode
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


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ()),
        ([], ()),
        ("done", (Retain("done"),)),
        ("soon", (Retain("keep", SOON_S, PRIORITY),)),
        (30, (Retain("keep", 30.0),)),
        (0.5, (Retain("keep", 0.5),)),
        (86400, (Retain("keep", 3600.0, tiers_s=86400.0),)),
        ({"priority": 90}, (Retain("keep", SOON_S, 90),)),
        ({"priority": 0}, (Retain("done"),)),
        ({"priority": 90, "duration": 60}, (Retain("keep", 60.0, 90),)),
        ({"retain": "done", "start": 512}, (Retain("done", start=512),)),
        ({"retain": "done", "end": 512}, (Retain("done", start=0, end=512),)),
        ({"retain": 5, "start": 0, "end": None}, (Retain("keep", 5.0, start=0),)),
        (
            [{"start": 0, "end": 1024, "priority": 80, "duration": 600}, {"start": 1024, "retain": "done"}],
            (Retain("keep", 600.0, 80, 0, 1024), Retain("done", start=1024)),
        ),
        (["soon"], (Retain("keep"),)),
    ],
)
def test_what_is_written_is_read(value: object, expected: tuple[Retain, ...]) -> None:
    assert retain_of(value) == expected


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("later", "'later'"),
        (True, "True"),
        (-1, "-1"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (10**400, "1000"),
        (MAX_PROMISE_S + 1, "2592001"),
        ({}, "sets no hint"),
        ({"start": 0}, "sets no hint"),
        ({"ttl": 5}, "'ttl'"),
        ({"priority": 101}, "101"),
        ({"priority": 1.5}, "1.5"),
        ({"priority": True}, "True"),
        ({"duration": "5m"}, "'5m'"),
        ({"retain": "done", "priority": 5}, "either"),
        ({"retain": "done", "start": -1}, "-1"),
        ({"retain": "done", "start": "0"}, "'0'"),
        ({"retain": "done", "start": 1 << 50}, str(1 << 50)),
        ({"retain": "done", "start": 5, "end": 5}, "end is 5"),
        ({"retain": {"priority": 5}}, "priority"),
        (["done"] * (MAX_RETAINS + 1), f"{MAX_RETAINS + 1} ranges"),
        (b"done", "done"),
        (object(), "object"),
    ],
)
def test_what_is_wrong_is_named(value: object, named: str) -> None:
    with pytest.raises(RequestError) as caught:
        retain_of(value)
    assert named in str(caught.value)
    assert caught.value.where == "retain"
    assert "docs/hints.md" in caught.value.hint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["done", "soon"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["retain", "priority", "duration", "start", "end", "more"]), inner, max_size=5
        )
    ),
    max_leaves=8,
)


@given(value=JSON)
def test_any_json_is_read_or_refused_and_what_is_read_passes_the_wire(value: object) -> None:
    try:
        retain = retain_of(value)
    except RequestError:
        return
    key = CacheKey("m", 1, None, bytes(16), 0, 256, "r", retain=retain)
    assert decode(msgspec.msgpack.encode(m.Lookup(key)), m.Lookup, where="LOOKUP").key == key


def test_a_key_without_a_hint_has_none_on_the_wire() -> None:
    key = CacheKey("m", 1, None, bytes(16), 0, 256, "r")
    assert "retain" not in msgspec.msgpack.decode(msgspec.msgpack.encode(key))


@pytest.mark.parametrize(
    "retain",
    [
        [{"what": "later"}],
        [{"what": "keep", "duration": math.nan}],
        [{"what": "keep", "duration": math.inf}],
        [{"what": "keep", "duration": -1.0}],
        [{"what": "keep", "duration": MAX_DURATION_S * 2}],
        [{"what": "keep", "priority": 0}],
        [{"what": "keep", "priority": 1 << 60}],
        [{"what": "done", "start": -1}],
        [{"what": "done", "start": 1 << 60}],
        [{"what": "done"}] * (MAX_RETAINS + 1),
        "done",
        [{}],
    ],
)
def test_the_wire_refuses_what_is_out_of_bounds(retain: Any) -> None:
    key = msgspec.to_builtins(CacheKey("m", 1, None, bytes(16), 0, 256, "r"), builtin_types=(bytes,))
    payload = msgspec.msgpack.encode({"key": {**key, "retain": retain}})
    with pytest.raises(InvalidPayload) as caught:
        decode(payload, m.Lookup, where="LOOKUP")
    assert "retain" in str(caught.value)
