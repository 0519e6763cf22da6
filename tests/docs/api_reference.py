"""Makes the pages below docs/reference/. mkdocstrings fills them from signatures and docstrings in the site's build."""

from __future__ import annotations

from typing import Any

import kvf_devices  # noqa: F401 - it has a descriptor
from kvframework.api.plugin import Provider
from kvframework.registry.discovery import KINDS
from tests.core.api import surface
from tests.docs import error_codes

API = "kvframework.api."
OF_KINDS = ("transport", "layout", "memory", "tier", "eviction", "hasher", "codec", "requests", "listener")
BESIDE = {"layout": ("tensors",), "transport": ("futures", "copy_plans"), "tier": ("helper_tier",)}
TAKEN = {f"{API}{name}" for kind in OF_KINDS for name in (kind, *BESIDE.get(kind, ()))} | {f"{API}hookspecs"}
# By page: its title and modules.
REFERENCE: dict[str, tuple[str, tuple[str, ...]]] = {
    kind: (f"API: {kind}", tuple(f"{API}{name}" for name in (kind, *BESIDE.get(kind, ())))) for kind in OF_KINDS
}
REFERENCE |= {
    "hookspecs": ("API: hook specifications", (f"{API}hookspecs",)),
    "common": (
        "API: for every kind",
        tuple(each for each in surface.MODULES if each.startswith(API) and each not in TAKEN),
    ),
    "devices": ("API: device drivers", ("kvf_devices",)),
    "client": ("API: client", ("kvframework.client",)),
    "errors": ("API: errors", ("kvframework.errors",)),
    "status": ("API: status document", ("kvframework.status",)),
    "messages": ("API: wire messages", ("kvframework.wire.messages",)),
    "kits": (
        "API: conformance kits",
        tuple(each for each in surface.MODULES if each.startswith("kvf_dev.")) + surface.SIMULATOR,
    ),
}

# By kind: its guide in docs/plugins.
GUIDES = {
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
DRIVERS = "kvf_devices"


def pages() -> dict[str, str]:
    """Return each page by its name, without the note of generated files."""
    tables = {"errors": error_codes.table, "hookspecs": _hooks}
    return {
        f"{name}.md": _page(title, tables[name]() if name in tables else "", modules)
        for name, (title, modules) in REFERENCE.items()
    }


def _page(title: str, table: str, modules: tuple[str, ...]) -> str:
    blocks = "\n".join(f"::: {module}\n" for module in modules)
    intro = f"{table}\n\n" if table else ""
    shown = "The site, which `tox run -e docs-site` builds, shows signatures and docstrings here, of:"
    return f"# {title}\n\n{intro}{shown}\n\n{blocks}"


def _hooks() -> str:
    """Return the table of hooks, with the descriptors that each may return and the guide of its kind."""
    lines = ["| kind | hook | descriptor | guide |", "|---|---|---|---|"]
    for kind, (hook, provider, _) in KINDS.items():
        described = ", ".join(map(_linked, _descriptors(kind, provider)))
        guide = f"[{GUIDES[kind]}](../plugins/{GUIDES[kind]})"
        lines.append(f"| `{kind}` | [`{hook}`](#{API}hookspecs.{hook}) | {described} | {guide} |")
    return "\n".join(lines)


def _descriptors(kind: str, base: type[Provider[Any]]) -> list[tuple[str, str, str]]:
    """Return page, module and name of each descriptor that a hook may return."""
    own = (kind, f"{API}{kind}", base.__name__)
    special = [each.__name__ for each in base.__subclasses__() if each.__module__.startswith(f"{DRIVERS}.")]
    return [own, *(("devices", DRIVERS, name) for name in special)]


def _linked(place: tuple[str, str, str]) -> str:
    page, module, name = place
    return f"[`{name}`]({page}.md#{module}.{name})"


def anchors(page: str) -> set[str]:
    """Return the anchors that the site gives to the public names of a page, and those of its rows."""
    names = {f"{module}.{name}" for module in REFERENCE[page][1] for name in surface.public(module)}
    return names | error_codes.anchors() if page == "errors" else names
