"""`kvframework config`: the check of a configuration, its values and origins, and changes to a running server's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from kvframework.api import command
from kvframework.api.console import print_document, print_error, print_rows, print_text, stdout
from kvframework.api.toml import toml_value
from kvframework.cli.serving import ServeOptions, with_capacity
from kvframework.client import KVClient
from kvframework.client.session import ENDPOINT_VARIABLE
from kvframework.client.status_source import quiet_connection
from kvframework.config.endpoint import default_endpoint
from kvframework.config.load import ARRAYS, FIELD_DEFAULT, Layers, apply_override, assemble, load_config, read_layers
from kvframework.config.schema import Config, PluginTable
from kvframework.errors import UnknownRequest, VersionMismatch
from kvframework.masking import HIDDEN
from kvframework.preflight import arena_is_kept, refusals, running_server
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import named_tables
from kvframework.running_config import shown_config
from kvframework.wire import messages as m

app = typer.Typer(cls=command.QuickGroup, help="Check and show the configuration.", no_args_is_help=True)
_File = Annotated[Path | None, typer.Argument(help=command.CONFIG_HELP, show_default=False)]
CONNECT_S = 5.0


@app.command(
    "check", epilog=command.examples("kvframework config check kvf.toml", "kvframework config check --set l1.use=x")
)
def check(file: _File = None, overrides: command.Overrides = None) -> None:
    """Check a configuration: whether a server would start with it here and now.

    That is its syntax and values, its plugins and their options, key files, folders, the memory, the socket and the
    ports. What a server of yours that runs at this endpoint holds does not count, so that a new file can be checked
    before the restart; it is named. Nor does what `kvframework hold` keeps for the next one. Run it as the server's
    user. The exit status is 2 if there is an error.

    It makes no plugin's object: `create` runs only at the start, so whether that of another distribution works is said
    to be unknown.
    """
    config, registry = load_config(file, overrides or ()), PluginRegistry()
    running = running_server(config)
    refused = False
    # As they are found: a plugin that does not return ends the command.
    for error in refusals(config, registry, replaces=running.pid if running else None, kept=arena_is_kept(config)):
        print_error(error)
        refused = True
    if refused:
        raise typer.Exit(command.EXIT_ERROR)
    print_text(Text.assemble(("ok", "bold green"), f": {config.source}: {_summary(config)}"))
    if running is not None:
        print_text(f"{config.server.endpoint or default_endpoint()}: {running}")
    offers = [registry.offer(descriptor.kind, table.use) for table, descriptor in named_tables(config)]
    if unknown := [f"{each.title} ({each.origin})" for each in offers if each.distribution != "kvframework"]:
        print_text(f"not checked before the server starts: `create` of {' and '.join(dict.fromkeys(unknown))}")


def _summary(config: Config) -> str:
    tables: dict[str, Iterable[PluginTable]] = {
        "l1": [config.l1.memory],
        "eviction": [config.l1.eviction],
        "l2": [l2.tier for l2 in config.l2],
        "hasher": [config.hasher],
        "transport": config.transport,
        "layout": config.layout,
        "requests": config.requests,
        "listener": config.listener,
    }
    return ", ".join(f"{name} {'+'.join(table.use for table in named)}" for name, named in tables.items() if named)


@app.command(
    "show",
    epilog=command.examples(
        "kvframework config show",
        "kvframework config show --config kvf.toml --set l1.capacity=8GiB",
        "kvframework config show > kvf.toml          a file to start from",
    ),
)
def show(
    config: command.ConfigFile = None, overrides: command.Overrides = None, as_json: command.AsJson = False
) -> None:
    """Show every value in force, including the plugins' options, with its origin.

    The output is TOML. Secrets are masked: passwords in URLs, and the options that a plugin marks as secret.
    """
    layers = read_layers(config, overrides or (), os.environ)
    sized = with_capacity(ServeOptions(config, overrides or (), {}, False), None)
    for chosen in sized.overrides[len(layers.overrides) :]:
        apply_override(layers.raw, chosen)
    view = view_config(layers, assemble(layers), PluginRegistry())
    if as_json:
        print_document(view)
    else:
        stdout.print(as_toml(view), markup=False)


def view_config(layers: Layers, config: Config, registry: PluginRegistry) -> dict[str, Any]:
    """The document of `config show`: `empty` lists the tables and arrays of tables that are not there; each table has a
    title such as "[[l2]] #1", its plugin, and its values with their origins. Blocking: imports the plugins that the
    configuration names, and creates no object of theirs. Raises `PluginError` and `ConfigFieldError` like
    `complete_config`: of a plugin that is not here the secret options are not known."""
    plugins = {table.where: f"{descriptor.kind}.{table.use}" for table, descriptor in named_tables(config)}
    tables: dict[str, dict[str, Any]] = {}
    empty = []
    for key, value in shown_config(config, registry).items():
        name, _, last = key.rpartition(".")
        array = key.partition(".")[0] in ARRAYS
        if not name:
            origin = layers.origin((key,), f"[[{key}]]") if array else FIELD_DEFAULT
            empty.append({"key": key, "value": value if array else None, "origin": origin})
        elif key != "server.curve":
            table, _, inner = name.partition(".")
            title = f"[[{table}]] #{int(inner) + 1}" if array else f"[{name}]"
            path = (table, int(inner) if array else inner, last) if inner else (table, last)
            plugin = f"codec.{inner}" if table == "codecs" and inner else plugins.get(f"{layers.where}: {title}", "")
            shown = tables.setdefault(title, {"table": title, "plugin": plugin, "values": []})
            shown["values"].append({"key": last, "value": value, "origin": layers.origin(path, title)})
    by_variable = layers.by_variable
    return {"source": layers.source, "by_environment": by_variable, "empty": empty, "tables": list(tables.values())}


def as_toml(view: dict[str, Any]) -> str:
    """Return the view as TOML with the same meaning, with the origins as comments."""
    named = ", named by KVFRAMEWORK_CONFIG" if view["by_environment"] else ""
    lines = [f"# {view['source']}{named}", *map(_line, view["empty"])]
    for table in view["tables"]:
        title = table["table"].partition(" #")[0]
        lines += ["", f"{title}  # {table['plugin']}" if table["plugin"] else title, *map(_line, table["values"])]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    value = row["value"]
    try:
        return f"{row['key']} = {toml_value(value)}  # {row['origin']}"
    except TypeError:  # TOML cannot express it, such as None
        return f"# {row['key']} = {'not set' if value is None else value}  # {row['origin']}"


@app.command(
    "apply",
    epilog=command.examples(
        "kvframework config apply kvf.toml --dry-run   what differs",
        "kvframework config apply kvf.toml             all of it, or nothing",
        "kvframework config apply kvf.toml --set log.level=debug",
    ),
)
def apply(
    file: _File = None,
    overrides: command.Overrides = None,
    endpoint: command.Endpoint = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the difference, and change nothing.")] = False,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds to wait for the server.")] = 60.0,
    as_json: command.AsJson = False,
) -> None:
    """Change the configuration of a running server, without a restart.

    It shows each key that differs, and whether that changes now or needs a restart. All of them change, or none: none
    if one needs a restart (exit status 1), or if a server would refuse to start with it (2). Run it as the server's
    user on its node. The server's own file is not written; a SIGHUP makes the server read that again.
    """
    layers = read_layers(file, overrides or (), os.environ)
    config = assemble(layers)
    asked = m.ApplyConfig(msgspec.json.encode(layers.raw), layers.where, dry_run)
    endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or config.server.endpoint or default_endpoint()
    quiet_connection()
    with KVClient(endpoint, name="config", connect_timeout_s=min(timeout, CONNECT_S)) as client:
        _ = client.hello
        try:
            applied = client.request("APPLY_CONFIG", asked, m.ConfigApplied, timeout=timeout)
        except UnknownRequest:
            raise VersionMismatch(
                "this server's release is older: only a restart changes its configuration", where=client.endpoint
            ) from None
    if as_json:
        print_document(applied)
    else:
        _show_changes(applied, dry_run=dry_run)
    if not all(each.now for each in applied.changes):
        raise typer.Exit(command.EXIT_FOUND)


def _show_changes(applied: m.ConfigApplied, *, dry_run: bool) -> None:
    rows = []
    for each in applied.changes:
        another = HIDDEN in each.old and each.old == each.new
        new = "another secret" if another else each.new or "not set"
        when = Text("now", "green") if each.now else Text("needs restart", "yellow")
        rows.append((each.key, each.old or "not set", new, when))
    if rows:
        print_rows(("KEY", "RUNNING", "NEW", "CHANGES"), rows)
    waiting = sum(not each.now for each in applied.changes)
    if not rows:
        print_text("the configuration has not changed")
    elif waiting:
        print_text(f"nothing has changed: {waiting} of {len(rows)} changed keys need a restart")
    else:
        print_text("dry run: nothing has changed" if dry_run else f"changed keys: {len(rows)}")
