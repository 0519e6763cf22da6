"""Owns `kvframework config`: is a configuration file right, before a server is started with it?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvframework.cli.console import stdout
from kvframework.config import Config, load_config
from kvframework.plugins import PluginRegistry, check_config

_app = typer.Typer(help="The configuration.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(_app, name="config")


@_app.callback()
def _group() -> None:
    """Keeps `check` a command of its own while it is the only one."""


@_app.command("check")
def check(
    file: Annotated[
        Path | None, typer.Argument(help="The TOML file; without it $KVFRAMEWORK_CONFIG, else the embedded default.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Override one value; repeatable.")
    ] = None,
) -> None:
    """Check a configuration: its syntax, its values, and that its plugins are installed and take their options."""
    config = load_config(file, overrides or ())
    check_config(config, PluginRegistry())
    stdout.print(Text.assemble(("ok", "bold green"), f": {config.source}: {_summary(config)}"))


def _summary(config: Config) -> str:
    parts: Sequence[tuple[str, Sequence[str]]] = (
        ("l1", [config.l1.memory.use]),
        ("eviction", [config.l1.eviction.use]),
        ("l2", [l2.tier.use for l2 in config.l2]),
        ("hasher", [config.hasher.use]),
        ("transport", [table.use for table in config.transport]),
        ("layout", [table.use for table in config.layout]),
        ("requests", [table.use for table in config.requests]),
    )
    return ", ".join(f"{name} {'+'.join(uses)}" for name, uses in parts if uses)
