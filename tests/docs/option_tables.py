"""Makes docs/reference/options.md out of the options structs of the plugins, ours and the examples'."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from kvframework.api.plugin import ByteSize, Options
from kvframework.api.toml import toml_value
from kvframework.registry.discovery import EntryPointInfo
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import OptionInfo, describe_options

ROOT = Path(__file__).resolve().parents[2]
# Folders of distributions.
PROJECTS = ("plugins/*", "plugins/*/*", "examples/*")
# Options that hold tables, by plugin.
INSIDE = {"layout.paged": "groups", "layout.opaque": "groups"}
HEAD = """\
# Options of plugins

In addition to `use`, a plugin's table in the [configuration](../configuration.md) takes these options.
`kvframework plugins info KIND.NAME` prints the options of an installed plugin.
"""
UNITS = ("", "KiB", "MiB", "GiB", "TiB")


def readmes() -> dict[Path, dict[str, EntryPointInfo]]:
    """Every README of a plugin, ours and the examples', and the entry points that it speaks of."""
    own = _entry_points(ROOT / "pyproject.toml")
    found = {}
    for module in sorted({offer.value.partition(".")[0] for offer in own.values()}):
        offers = {title: offer for title, offer in own.items() if offer.value.partition(".")[0] == module}
        found[ROOT / "plugins" / "defaults" / module / "README.md"] = offers
    for project in sorted(each for place in PROJECTS for each in ROOT.glob(f"{place}/pyproject.toml")):
        if offers := _entry_points(project):
            found[project.with_name("README.md")] = offers
    return found


def is_ours(readme: Path) -> bool:
    return ROOT / "plugins" in readme.parents


def importable(readme: Path) -> str:
    """The folder from which a plugin is imported."""
    return str(readme.parent if readme.with_name("pyproject.toml").exists() else readme.parents[1])


def page() -> str:
    """Return the page, without its note."""
    parts = [HEAD]
    for readme, offers in readmes().items():
        sys.path.insert(0, importable(readme))
        try:
            parts += [_section(title, offer, readme) for title, offer in offers.items()]
        finally:
            sys.path.remove(importable(readme))
    return "\n".join(parts)


def _section(title: str, offer: EntryPointInfo, readme: Path) -> str:
    place = readme.relative_to(ROOT)
    text = f"## {title}\nOf [{place.parent.name}](../../{place}).\n\n{_table(offer, None)}"
    if title in INSIDE:
        text += f"\n### {title} {INSIDE[title]}\n{_table(offer, INSIDE[title])}"
    return text


def _entry_points(pyproject: Path) -> dict[str, EntryPointInfo]:
    _, _, text = pyproject.read_text().partition('[project.entry-points."kvframework.v1"]\n')
    lines = re.findall(r'^"?(\w+)\.([\w-]+)"? = "([\w.:]+)"$', text.partition("\n[")[0], re.MULTILINE)
    return {
        f"{kind}.{name}": EntryPointInfo(kind, name, pyproject.parent.name, "", value) for kind, name, value in lines
    }


def _table(offer: EntryPointInfo, inside: str | None) -> str:
    _, provider = PluginRegistry([offer]).describe(offer.kind, offer.name)
    assert provider is not None, offer
    described = describe_options(_inner(provider.options, inside) if inside else provider.options)
    return rows(described, "option") if described else "No options.\n"


def rows(described: Sequence[OptionInfo], title: str) -> str:
    """The table of a struct's fields; `title` heads its first column."""
    cells = [
        f"| `{each.name}` | {_cell(each.type)} | {_default(each)} | {_cell(each.description)} |" for each in described
    ]
    return "\n".join([f"| {title} | type | default | meaning |", "|---|---|---|---|", *cells]) + "\n"


def _inner(options: type[Options], name: str) -> Any:
    """The struct that an option holds, or a list of."""
    struct = inspect.type_info(options)
    assert isinstance(struct, inspect.StructType)
    kind: Any = next(field.type for field in struct.fields if field.name == name)
    while not isinstance(kind, inspect.StructType):
        kind = kind.type if isinstance(kind, inspect.Metadata) else kind.item_type
    return kind.cls


def _default(option: OptionInfo) -> str:
    if option.required:
        return "required"
    if option.default is None:
        return "not set"
    value = option.default
    if isinstance(value, ByteSize):
        power = next(power for power in reversed(range(5)) if value % (1 << 10 * power) == 0) if value else 0
        return f'`"{value >> 10 * power}{UNITS[power]}"`' if power else f"`{int(value)}`"
    return f"`{toml_value(msgspec.to_builtins(value))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
