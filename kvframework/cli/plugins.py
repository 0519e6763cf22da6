"""`kvframework plugins`: the installed plugins, the options of each, and why one is unavailable."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from kvframework.api.command import AsJson, examples
from kvframework.api.console import print_document, print_rows, print_text, stdout
from kvframework.api.tier import TierProvider
from kvframework.api.toml import toml_value
from kvframework.cli.commands import CommandGroup
from kvframework.errors import PluginNotFound
from kvframework.registry.discovery import KINDS
from kvframework.registry.plugin_check import AnyProvider
from kvframework.registry.registry import PluginInfo, PluginRegistry
from kvframework.registry.tables import OptionInfo, describe_options

_COLUMNS = ("name", "kind", "distribution", "version", "status", "reason")
_STYLES = {"available": "green", "unavailable": "yellow"}


class PluginsGroup(CommandGroup):
    """The core's commands about plugins, followed by those of other distributions."""

    prefix = "plugins."


app = typer.Typer(cls=PluginsGroup, help="List, describe and check plugins.", no_args_is_help=True)


@app.command("list", epilog=examples("kvframework plugins list", "kvframework plugins list --json"))
def list_plugins(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False) -> None:
    """List every installed plugin, with the reason if it cannot be used here."""
    infos = PluginRegistry().list(probe=True)
    rows = [{column: str(getattr(info, column)) for column in _COLUMNS} for info in infos]
    rows = [row | {"name": f"{row['kind']}.{row['name']}" if row["kind"] else row["name"]} for row in rows]
    if as_json:
        print_document(rows)
        return
    # On a terminal, reasons follow the table; the kind is in the name.
    terminal = stdout.is_terminal
    columns = ("name", "distribution", "version", "status") if terminal else _COLUMNS
    cells = ([_status(row[name]) if name == "status" else row[name] for name in columns] for row in rows)
    print_rows([name.upper() for name in columns], cells, whole=("NAME", "STATUS"))
    for row in rows if terminal else ():
        if row["reason"]:
            stdout.print()
            print_text(Text.assemble((row["name"], "bold"), f": {row['reason']}"))


def _status(status: str) -> Text:
    return Text(status, _STYLES.get(status, "red"))


@app.command(
    "info", epilog=examples("kvframework plugins info tier.redis", "kvframework plugins info layout.paged --json")
)
def info(
    plugin: Annotated[str, typer.Argument(metavar="KIND.NAME", help="As `plugins list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Describe one plugin: its purpose, whether it can be used here, and the options of its table in the TOML."""
    kind, dot, name = plugin.partition(".")
    registry = PluginRegistry()
    if not dot:
        meant = [f"{kind}.{plugin}" for kind in KINDS if plugin in registry.names(kind)]
        fact = f"{plugin!r} is not of the form KIND.NAME"
        hint = f"did you mean {' or '.join(meant)}?" if meant else "`kvframework plugins list` shows the names"
        raise PluginNotFound(fact, available=f"the kinds {', '.join(KINDS)}", hint=hint)
    view = _view(*registry.describe(kind, name))
    if as_json:
        print_document(view)
    else:
        _show(view)


def _view(infos: list[PluginInfo], provider: AnyProvider | None) -> dict[str, Any]:
    """The facts about one plugin. `table` is where it is named in the TOML, `rivals` are the other distributions that
    offer the same name, `calls_at_once` the defaults of a tier. Those from `summary` on need it loaded."""
    first, *rivals = infos
    tier = provider if isinstance(provider, TierProvider) else None
    return {
        "name": f"{first.kind}.{first.name}",
        **{name: getattr(first, name) for name in ("kind", "distribution", "version", "status", "reason")},
        "rivals": [f"{rival.distribution} {rival.version}" for rival in rivals],
        "table": KINDS[first.kind].table,
        "summary": provider and provider.summary,
        "requires_api": provider and provider.requires_api,
        "shared": tier is not None and tier.shared,
        "calls_at_once": {"loads": tier.loads, "writes": tier.writes} if tier else {},
        "options": describe_options(provider.options) if provider else [],
    }


def _show(view: dict[str, Any]) -> None:
    """Print a view. A plugin's texts are shown verbatim, never as markup."""
    facts: list[tuple[str, str | Text]] = [
        ("distribution", f"{view['distribution']} {view['version']}"),
        *(("also offered by", rival) for rival in view["rivals"]),
        ("status", _status(view["status"])),
        ("reason", view["reason"]),
        ("table", view["table"]),
        ("plugin API", view["requires_api"] or ""),
        ("shared", "several nodes may use one store" if view["shared"] else ""),
        ("calls at once", ", ".join(f"{name} = {number}" for name, number in view["calls_at_once"].items())),
    ]
    print_text(Text.assemble((view["name"], "bold"), f": {view['summary']}" if view["summary"] else ""))
    for label, value in facts:
        if value:
            print_text(Text.assemble(f"  {label + ':':16} ", value))
    if view["summary"] is None:
        return
    stdout.print()
    if not view["options"]:
        stdout.print("no options")
        return
    rows = []
    for option in view["options"]:
        meaning = f"{option.description}{' (shown masked)' if option.secret else ''}".strip()
        rows.append((option.name, option.type, _default(option), meaning))
    print_rows(("OPTION", "TYPE", "DEFAULT", "MEANING"), rows, whole=("OPTION",))


def _default(option: OptionInfo) -> str:
    if option.required:
        return "required"
    try:
        return toml_value(option.default)
    except TypeError:
        return "not set" if option.default is None else str(option.default)
