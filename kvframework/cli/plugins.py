"""`kvframework plugins`: the installed plugins, the options of each, why one is unavailable, and the problems its
author should fix."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from kvframework.cli.console import EXIT_FOUND, examples, print_document, print_table
from kvframework.cli.plugin_view import PluginView, show_plugin, show_report
from kvframework.config import apply_override
from kvframework.errors import PluginNotFound
from kvframework.inspection import inspect_plugin
from kvframework.registry import KINDS, PluginInfo, PluginRegistry, discover

_COLUMNS = ("name", "kind", "distribution", "version", "status", "reason")
_STYLES = {"available": "green", "unavailable": "yellow"}

_app = typer.Typer(help="List, describe and check plugins.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(_app, name="plugins")


@_app.command("list", epilog=examples("kvframework plugins list", "kvframework plugins list --json"))
def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List every installed plugin, with the reason if it cannot be used here."""
    with _quiet_imports():
        rows = [_row(info) for info in PluginRegistry().list(probe=True)]
    if as_json:
        print_document(rows)
        return
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column.upper(), no_wrap=column in ("name", "status"), overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[column], _style(column, row)) for column in _COLUMNS))
    print_table(table)


def _complete(incomplete: str) -> list[str]:
    """Complete names for the shell's TAB, from metadata alone."""
    return sorted({offer.title for offer in discover() if offer.title.startswith(incomplete)})


@_app.command(
    "info", epilog=examples("kvframework plugins info tier.redis", "kvframework plugins info layout.paged --json")
)
def info(
    plugin: Annotated[
        str, typer.Argument(metavar="KIND.NAME", help="As `plugins list` shows it.", autocompletion=_complete)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
) -> None:
    """Describe one plugin: its purpose, whether it can be used here, and the options of its table in the TOML."""
    kind, dot, name = plugin.partition(".")
    registry = PluginRegistry()
    if not dot:
        raise _no_name(plugin, registry)
    with _quiet_imports():
        view = PluginView.of(*registry.describe(kind, name))
    if as_json:
        print_document(view)
    else:
        show_plugin(view)


@_app.command(
    "check",
    epilog=examples(
        "kvframework plugins check tier.mystore",
        "kvframework plugins check tier.mystore --set path=/tmp/store",
        "kvframework plugins check kvf_mystore --json",
    ),
)
def check(
    plugin: Annotated[str, typer.Argument(metavar="MODULE|KIND.NAME", help="What to check.", autocompletion=_complete)],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="An option that the plugin KIND.NAME is made with; repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document.")] = False,
) -> None:
    """Check a plugin before it is published: its metadata, source, import, hooks, options, and the objects it creates.

    The plugin is imported and called in separate processes, each with a deadline. The exit status is 1 if there is an
    error; warnings alone leave it 0. The conformance kits of kvframework.testing check its behaviour.
    """
    options: dict[str, object] = {}
    for setting in settings or ():
        apply_override(options, setting)
    report = inspect_plugin(plugin, options)
    if as_json:
        print_document(report)
    else:
        show_report(report)
    if report.errors:
        raise typer.Exit(EXIT_FOUND)


def _no_name(plugin: str, registry: PluginRegistry) -> PluginNotFound:
    meant = [f"{kind}.{plugin}" for kind in KINDS if plugin in registry.names(kind)]
    return PluginNotFound(
        f"{plugin!r} is not of the form KIND.NAME",
        available=f"the kinds {', '.join(KINDS)}",
        hint=f"did you mean {' or '.join(meant)}?" if meant else "`kvframework plugins list` shows the names",
    )


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    """Redirect output of plugins that are imported within the block, which must not end up in the JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _style(column: str, row: dict[str, str]) -> str:
    return _STYLES.get(row["status"], "red") if column == "status" else ""


def _row(info: PluginInfo) -> dict[str, str]:
    row = {column: getattr(info, column) for column in _COLUMNS}
    return row | {"name": f"{info.kind}.{info.name}" if info.kind else info.name}
