"""The whole command line as click sees it: the core's commands, and those of the distributions of this repository."""

from __future__ import annotations

from typing import Any

import typer

from kvframework.cli.app import app
from kvframework.cli.commands import CORE, KNOWN
from kvframework.errors import PluginUnavailable


def whole_cli(*, without: tuple[str, ...] = ()) -> Any:
    """The tree of commands, without those named and those that are not installed."""
    tree: Any = typer.main.get_command(app)
    for full in (*CORE, *KNOWN):
        *groups, name = full.split(".")
        group = tree
        for each in groups:
            group = group.commands[each]
        if full in without:
            continue
        try:
            command = group.get_command(None, name).load()
        except PluginUnavailable:
            continue
        group.add_command(command, name)
    return tree
