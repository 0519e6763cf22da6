"""Makes docs/plugins/hooks.md out of the hook specifications and the descriptors that hooks return."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import kvf_devices  # noqa: F401 - it has a descriptor of its own
from kvframework.api import hookspecs
from kvframework.api.plugin import Provider
from kvframework.registry import KINDS
from tests.docs.prose import wrapped

HOOKS: dict[str, Callable[[], object]] = {
    name: hook for name, hook in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("kvf_")
}
PUBLIC = ("kvframework.api.", "kvf_devices.")
# The page of each kind.
PAGES = {
    "transport": "transports.md",
    "layout": "layouts.md",
    "memory": "memory.md",
    "tier": "tiers.md",
    "eviction": "eviction.md",
    "hasher": "hashers.md",
    "codec": "codecs.md",
    "requests": "requests.md",
    "listener": "listeners.md",
}
HEAD = """\
# Hooks

A plugin is a module with functions marked `@hookimpl`. Each hook takes no argument and returns a
list of *provider descriptors*; a descriptor's `create` makes the plain object that the server or
the engine calls. Hooks run once, at startup.

```toml
[project.entry-points."kvframework.v1"]
"tier.mystore" = "kvf_mystore"
```

One entry point names one provider, as `<kind>.<name>`; several may name the same module. All offers
are collected: two distributions that offer one name are an error that names both. A module is
imported only by a process whose configuration or command names one of its plugins.
"""


def page() -> str:
    parts = [HEAD, "| kind | hook | descriptor | page |", "|---|---|---|---|"]
    for kind, (hook, provider) in KINDS.items():
        described = ", ".join(f"`{each.__name__}`" for each in _descriptors(provider))
        parts.append(f"| `{kind}` | [`{hook}`](#{hook}) | {described} | [{PAGES[kind]}]({PAGES[kind]}) |")
    parts += ["", "## What every descriptor holds", "", _doc(Provider).partition("\n\n")[2], "", _fields(Provider)]
    for kind, (hook, provider) in KINDS.items():
        parts += ["", _hook(kind, hook, provider)]
    return "\n".join(parts) + "\n"


def _hook(kind: str, name: str, base: type[Provider[Any]]) -> str:
    text = inspect.getdoc(HOOKS[name]) or ""
    summary, _, rest = text.partition("\n\n")
    intro, _, code = rest.partition(":\n\n")
    guide = PAGES[kind]
    parts = [
        f"## `{name}`",
        f"`{_signature(HOOKS[name])}`",
        "",
        wrapped(f"{_joined(summary)} How to write one: [{guide}]({guide})."),
    ]
    for provider in _descriptors(base):
        parts += [
            "",
            f"**`{provider.__name__}`**",
            "",
            _doc(provider),
            "",
        ]
        parts.append(_fields(provider))
    if code:
        parts += ["", wrapped(f"{_joined(intro)}:"), "", "```python", textwrap.dedent(code).strip(), "```"]
    return "\n".join(parts)


def _descriptors(base: type[Provider[Any]]) -> list[type[Provider[Any]]]:
    """Those that a hook may return, with its special ones."""
    return [each for each in (base, *base.__subclasses__()) if each.__module__.startswith(PUBLIC)]


def _fields(provider: type[Provider[Any]]) -> str:
    """The fields that a descriptor adds or changes."""
    base = provider.__mro__[1]
    known = {field.name: field for field in dataclasses.fields(base)} if issubclass(base, Provider) else {}
    lines = ["| field | type | default |", "|---|---|---|"]
    for field in dataclasses.fields(provider):
        if not field.init or (field.name in known and known[field.name].default is field.default):
            continue
        default = "required" if field.default is dataclasses.MISSING else f"`{_default(field.default)}`"
        kind = str(field.type).replace("|", "\\|")
        lines.append(f"| `{field.name}` | `{kind}` | {default} |")
    return "\n".join(lines)


def _default(value: object) -> str:
    return value.__name__ if isinstance(value, type) or inspect.isfunction(value) else repr(value)


def _signature(hook: Callable[[], object]) -> str:
    return f"{hook.__name__}{inspect.signature(hook)}".replace("'", "")


def _doc(each: type) -> str:
    """A docstring's paragraphs, wrapped."""
    assert each.__doc__, each
    assert not each.__doc__.startswith(f"{each.__name__}("), "dataclass wrote it: give it a docstring"
    return "\n\n".join(map(wrapped, (inspect.cleandoc(each.__doc__ or "")).split("\n\n")))


def _joined(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
