"""Owns `kvframework plugins`: what is installed, and why something of it cannot be used."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvframework.cli.console import stdout
from kvframework.plugins import PluginInfo, PluginRegistry

_COLUMNS = ("name", "kind", "distribution", "version", "status", "reason")
_PIPE_WIDTH = 1000
_STYLES = {"available": "green", "unavailable": "yellow"}

_app = typer.Typer(help="The installed plugins.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(_app, name="plugins")


@_app.callback()
def _group() -> None:
    """Keeps `list` a command of its own while it is the only one."""


@_app.command("list")
def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List every installed plugin, whether it can be used here, and if not, why."""
    # Plugins are imported here; what one prints at import must not end up in the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        rows = [_row(info) for info in PluginRegistry().list(probe=True)]
    if as_json:
        stdout.print(msgspec.json.format(msgspec.json.encode(rows)).decode(), markup=False)
        return
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column.upper(), no_wrap=column in ("name", "status"), overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[column], _style(column, row)) for column in _COLUMNS))
    # Whoever reads the table from a pipe wants one line per plugin.
    console = stdout if stdout.is_terminal else Console(width=_PIPE_WIDTH)
    console.print(table, soft_wrap=False)


def _style(column: str, row: dict[str, str]) -> str:
    return _STYLES.get(row["status"], "red") if column == "status" else ""


def _row(info: PluginInfo) -> dict[str, str]:
    row = {column: getattr(info, column) for column in _COLUMNS}
    return row | {"name": f"{info.kind}.{info.name}" if info.kind else info.name}
