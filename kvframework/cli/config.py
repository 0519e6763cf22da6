"""`kvframework config`: the values of a configuration, and a check of it without a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvframework.api.command import Endpoint, QuickGroup, examples
from kvframework.cli.usage import CONFIG_HELP, EXIT_ERROR, EXIT_FOUND, AsJson, ConfigFile, Overrides

if TYPE_CHECKING:
    from kvframework.config import Config

_app = typer.Typer(cls=QuickGroup, help="Check and show the configuration.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(_app, name="config")


@_app.command("check", epilog=examples("kvframework config check kvf.toml", "kvframework config check --set l1.use=x"))
def check(
    file: Annotated[Path | None, typer.Argument(help=CONFIG_HELP, show_default=False)] = None,
    overrides: Overrides = None,
) -> None:
    """Check a configuration: whether a server would start with it here and now.

    That is its syntax and values, its plugins and their options, key files, folders, the memory, the socket and the
    ports. What a server of yours that runs at this endpoint holds does not count, so that a new file can be checked
    before the restart; it is named. Nor does what `kvframework hold` keeps for the next one. Run it as the server's
    user. The exit status is 2 if there is an error.

    It makes no plugin's object: `create` runs only at the start, so whether that of another distribution works is said
    to be unknown.
    """
    from rich.text import Text

    from kvframework.cli.console import print_error, print_text
    from kvframework.config import default_endpoint, load_config
    from kvframework.preflight import arena_is_kept, refusals, running_server
    from kvframework.registry import PluginRegistry, named_tables

    config = load_config(file, overrides or ())
    running = running_server(config)
    replaces = None if running is None else running.pid
    registry = PluginRegistry()
    refused = False
    # As they are found: a plugin that does not return ends the command.
    for error in refusals(config, registry, replaces=replaces, kept=arena_is_kept(config)):
        print_error(error)
        refused = True
    if refused:
        raise typer.Exit(EXIT_ERROR)
    print_text(Text.assemble(("ok", "bold green"), f": {config.source}: {_summary(config)}"))
    if running is not None:
        print_text(f"{config.server.endpoint or default_endpoint()}: {running}")
    offers = [registry.offer(descriptor.kind, table.use) for table, descriptor in named_tables(config)]
    if unknown := [f"{each.title} ({each.origin})" for each in offers if each.distribution != "kvframework"]:
        print_text(f"unknown until the start: whether `create` of {' and '.join(dict.fromkeys(unknown))} works")


@_app.command(
    "show",
    epilog=examples(
        "kvframework config show",
        "kvframework config show --config kvf.toml --set l1.capacity=8GiB",
        "kvframework config show > kvf.toml          a file to start from",
    ),
)
def show(
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show every value in force, including the plugins' options, with its origin.

    The output is TOML. Secrets are masked: passwords in URLs, and the options that a plugin marks as secret.
    """
    from kvframework.api.console import stdout
    from kvframework.cli.config_view import as_toml, view_config
    from kvframework.cli.console import print_document
    from kvframework.config import assemble, read_layers
    from kvframework.registry import PluginRegistry

    layers = read_layers(config, overrides or (), os.environ)
    view = view_config(layers, assemble(layers), PluginRegistry())
    if as_json:
        print_document(view)
    else:
        stdout.print(as_toml(view, width=stdout.width if stdout.is_terminal else None), markup=False)


@_app.command(
    "apply",
    epilog=examples(
        "kvframework config apply kvf.toml --dry-run   what differs",
        "kvframework config apply kvf.toml             all of it, or nothing",
        "kvframework config apply kvf.toml --set log.level=debug",
    ),
)
def apply(
    file: Annotated[Path | None, typer.Argument(help=CONFIG_HELP, show_default=False)] = None,
    overrides: Overrides = None,
    endpoint: Endpoint = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the difference, and change nothing.")] = False,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the server.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Change the configuration of a running server, without a restart.

    It shows each key that differs, and whether that changes now or needs a restart. All of them change, or none: none
    if one needs a restart (exit status 1), or if a server would refuse to start with it (2). Run it as the server's
    user on its node. The server's own file is not written; a SIGHUP makes the server read that again.
    """
    from kvframework.cli.config_view import ask_for_changes, show_changes
    from kvframework.cli.console import print_document

    applied = ask_for_changes(file, overrides or (), endpoint, dry_run=dry_run, timeout_s=timeout)
    if as_json:
        print_document(applied)
    else:
        show_changes(applied, dry_run=dry_run)
    if not all(each.now for each in applied.changes):
        raise typer.Exit(EXIT_FOUND)


def _summary(config: Config) -> str:
    parts: tuple[tuple[str, list[str]], ...] = (
        ("l1", [config.l1.memory.use]),
        ("eviction", [config.l1.eviction.use]),
        ("l2", [l2.tier.use for l2 in config.l2]),
        ("hasher", [config.hasher.use]),
        ("transport", [table.use for table in config.transport]),
        ("layout", [table.use for table in config.layout]),
        ("requests", [table.use for table in config.requests]),
        ("listener", [table.use for table in config.listeners]),
    )
    return ", ".join(f"{name} {'+'.join(uses)}" for name, uses in parts if uses)
