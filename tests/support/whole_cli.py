"""The whole command line as click sees it: the core's commands, and those of the distributions of this repository."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import typer

from kvframework.api.toml import read_toml
from kvframework.cli.commands import CORE, FoundCommand, app

ROOT = Path(__file__).resolve().parents[2]


def whole_cli(*, without: tuple[str, ...] = ()) -> Any:
    """The tree of commands, without those named and those whose modules are not installed. As the sources name them,
    not as an installation of some time ago does."""
    places = {name: place for name, (place, _) in CORE.items()}
    for file in (*ROOT.glob("plugins/**/pyproject.toml"), ROOT / "benchmarks" / "pyproject.toml"):
        groups = read_toml(file)["project"].get("entry-points", {})
        places |= groups.get("kvframework.commands", {})
    tree: Any = typer.main.get_command(app)
    for full in [*CORE, *sorted(places.keys() - CORE.keys())]:
        *groups, name = full.split(".")
        group = tree
        for each in groups:
            group = group.commands[each]
        if full in without:
            continue
        try:
            loaded = resolve_name(places[full])
        except ModuleNotFoundError:
            continue
        group.add_command(FoundCommand(name, "", lambda loaded=loaded: loaded).load(), name)
    return tree
