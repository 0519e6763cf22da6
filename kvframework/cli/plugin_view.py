"""The views of `kvframework plugins list` and `plugins info`: documents, and their form on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from rich.table import Table
from rich.text import Text

from kvframework.api.console import stdout
from kvframework.api.tier import TierProvider
from kvframework.cli.console import print_table, print_text
from kvframework.config import toml_value
from kvframework.registry import AnyProvider, OptionInfo, PluginInfo, describe_options

_COLUMNS = ("name", "kind", "distribution", "version", "status", "reason")


def plugin_rows(infos: Iterable[PluginInfo]) -> list[dict[str, str]]:
    """Return the documents of `plugins list --json`."""
    rows = [{column: str(getattr(info, column)) for column in _COLUMNS} for info in infos]
    return [row | {"name": f"{row['kind']}.{row['name']}" if row["kind"] else row["name"]} for row in rows]


def show_plugins(rows: list[dict[str, str]]) -> None:
    """Print a row per plugin. On a terminal, reasons follow the table; the kind is in the name."""
    terminal = stdout.is_terminal
    columns = ("name", "distribution", "version", "status") if terminal else _COLUMNS
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.upper(), no_wrap=column in ("name", "status"), overflow="fold")
    for row in rows:
        style = _STYLES.get(row["status"], "red")
        table.add_row(*(Text(row[column], style if column == "status" else "") for column in columns))
    print_table(table)
    for row in rows if terminal else ():
        if row["reason"]:
            stdout.print()
            print_text(Text.assemble((row["name"], "bold"), f": {row['reason']}"))


_TABLES = {
    "transport": "[[transport]]",
    "layout": "[[layout]]",
    "memory": "[l1]",
    "tier": "[[l2]]",
    "eviction": "[l1.eviction]",
    "hasher": "[hasher]",
    "codec": "codec of [[l2]]",
    "requests": "[[requests]]",
    "listener": "[[listener]]",
}
_STYLES = {"available": "green", "unavailable": "yellow"}


class PluginView(msgspec.Struct, frozen=True):
    """The facts about one plugin. From `summary` on they are None or empty for a plugin that could not be loaded.

    `table` is where it is named in the TOML. `rivals` are the other distributions that offer the same name.
    `shared` says of a tier that several nodes may use one store; `calls_at_once` are a tier's defaults of `loads` and
    `writes` of its `[[l2]]`, empty for all others.
    """

    name: str
    kind: str
    distribution: str
    version: str
    status: str
    reason: str
    rivals: list[str]
    table: str
    summary: str | None = None
    requires_api: str | None = None
    shared: bool = False
    calls_at_once: dict[str, int] = {}
    options: list[OptionInfo] = []

    @classmethod
    def of(cls, infos: list[PluginInfo], provider: AnyProvider | None) -> PluginView:
        """Read the result of `PluginRegistry.describe`."""
        info = infos[0]
        view = cls(
            name=f"{info.kind}.{info.name}",
            kind=info.kind,
            distribution=info.distribution,
            version=info.version,
            status=info.status,
            reason=info.reason,
            rivals=[f"{rival.distribution} {rival.version}" for rival in infos[1:]],
            table=_TABLES[info.kind],
        )
        return msgspec.structs.replace(view, **_described(provider)) if provider is not None else view


def show_plugin(view: PluginView) -> None:
    """Print a view. A plugin's texts are shown verbatim, never as markup."""
    facts: list[tuple[str, str | Text]] = [
        ("distribution", f"{view.distribution} {view.version}"),
        *(("also offered by", rival) for rival in view.rivals),
        ("status", Text(view.status, _STYLES.get(view.status, "red"))),
        ("reason", view.reason),
        ("table", view.table),
        ("plugin API", view.requires_api or ""),
        ("shared", "several nodes may use one store" if view.shared else ""),
        ("calls at once", ", ".join(f"{name} = {number}" for name, number in view.calls_at_once.items())),
    ]
    print_text(Text.assemble((view.name, "bold"), f": {view.summary}" if view.summary else ""))
    for label, value in facts:
        if value:
            print_text(Text.assemble(f"  {label + ':':16} ", value))
    if view.summary is None:
        return
    stdout.print()
    if view.options:
        print_table(_options(view.options))
    else:
        stdout.print("no options")


def _described(provider: AnyProvider) -> dict[str, object]:
    return {
        "summary": provider.summary,
        "requires_api": provider.requires_api,
        "shared": isinstance(provider, TierProvider) and provider.shared,
        "calls_at_once": (
            {"loads": provider.loads, "writes": provider.writes} if isinstance(provider, TierProvider) else {}
        ),
        "options": describe_options(provider.options),
    }


def _options(options: list[OptionInfo]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("OPTION", "TYPE", "DEFAULT", "MEANING"):
        table.add_column(column, overflow="fold", no_wrap=column == "OPTION")
    for option in options:
        meaning = f"{option.description}{' (shown masked)' if option.secret else ''}".strip()
        table.add_row(*map(Text, (option.name, option.type, _default(option), meaning)))
    return table


def _default(option: OptionInfo) -> str:
    if option.required:
        return "required"
    try:
        return toml_value(option.default)
    except TypeError:
        return "not set" if option.default is None else str(option.default)
