"""Makes docs/plugins/hooks.md out of the hook specifications and the descriptors that hooks return."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

from kvframework.api import hookspecs
from kvframework.api.driver import DeviceTransportProvider
from kvframework.api.plugin import Provider
from kvframework.api.transport import AnyTransportProvider
from kvframework.registry import KINDS
from tests.docs.prose import wrapped

HOOKS: dict[str, Callable[[], object]] = {
    name: hook for name, hook in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("kvf_")
}
API = "kvframework.api."
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
    for kind, (hook, providers) in KINDS.items():
        described = ", ".join(f"`{each.__name__}`" for each in _descriptors(providers))
        parts.append(f"| `{kind}` | [`{hook}`](#{hook}) | {described} | [{PAGES[kind]}]({PAGES[kind]}) |")
    parts += ["", "## What every descriptor holds", "", _doc(Provider).partition("\n\n")[2], "", _fields(Provider)]
    for kind, (hook, providers) in KINDS.items():
        parts += ["", _hook(kind, hook, providers)]
    return "\n".join(parts) + "\n"


def _hook(kind: str, name: str, providers: tuple[type[Provider[Any]], ...]) -> str:
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
    for provider in _descriptors(providers):
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


def _descriptors(providers: tuple[type[Provider[Any]], ...]) -> list[type[Provider[Any]]]:
    """Those that a hook may return, with the special ones of each."""
    return [each for base in providers for each in (base, *base.__subclasses__()) if each.__module__.startswith(API)]


def _fields(provider: type[Provider[Any]]) -> str:
    """The fields that a descriptor adds or changes."""
    base = provider.__mro__[1]
    if base is AnyTransportProvider:
        base = Provider
    known = {field.name: field for field in dataclasses.fields(base)} if issubclass(base, Provider) else {}
    lines = ["| field | type | default |", "|---|---|---|"]
    for field in dataclasses.fields(provider):
        if field.name in known and known[field.name].default is field.default:
            continue
        default = "required" if field.default is dataclasses.MISSING else f"`{_default(field.default)}`"
        if provider is DeviceTransportProvider and field.name == "create":
            default = "made by the core"
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
