"""`kvframework config`: a check of a configuration without a server, its values with their origins, and the change of a
running server's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.cells import cell_len
from rich.text import Text

from kvframework.api.codec import CodecProvider
from kvframework.api.command import Endpoint, QuickGroup, examples
from kvframework.api.console import stdout
from kvframework.api.eviction import EvictionProvider
from kvframework.api.hasher import HasherProvider
from kvframework.api.layout import LayoutProvider
from kvframework.api.listener import ListenerProvider
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import Provider
from kvframework.api.requests import RequestsProvider
from kvframework.api.tier import TierProvider
from kvframework.api.toml import toml_value
from kvframework.api.transport import AnyTransportProvider
from kvframework.cli.console import print_document, print_error, print_rows, print_text
from kvframework.cli.usage import CONFIG_HELP, EXIT_ERROR, EXIT_FOUND, AsJson, ConfigFile, Overrides
from kvframework.client import KVClient
from kvframework.client.session import ENDPOINT_VARIABLE
from kvframework.client.status_source import quiet_connection
from kvframework.config import (
    FIELD_DEFAULT,
    Config,
    Layers,
    PluginTable,
    assemble,
    default_endpoint,
    load_config,
    read_layers,
)
from kvframework.errors import UnknownRequest, VersionMismatch
from kvframework.masking import HIDDEN, shown_options
from kvframework.preflight import arena_is_kept, refusals, running_server
from kvframework.registry import PluginRegistry, codec_tables, named_tables, resolve_table
from kvframework.wire import messages as m

app = typer.Typer(cls=QuickGroup, help="Check and show the configuration.", no_args_is_help=True)
_File = Annotated[Path | None, typer.Argument(help=CONFIG_HELP, show_default=False)]
CONNECT_S = 5.0


@app.command("check", epilog=examples("kvframework config check kvf.toml", "kvframework config check --set l1.use=x"))
def check(file: _File = None, overrides: Overrides = None) -> None:
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
        raise typer.Exit(EXIT_ERROR)
    print_text(Text.assemble(("ok", "bold green"), f": {config.source}: {_summary(config)}"))
    if running is not None:
        print_text(f"{config.server.endpoint or default_endpoint()}: {running}")
    offers = [registry.offer(descriptor.kind, table.use) for table, descriptor in named_tables(config)]
    if unknown := [f"{each.title} ({each.origin})" for each in offers if each.distribution != "kvframework"]:
        print_text(f"unknown until the start: whether `create` of {' and '.join(dict.fromkeys(unknown))} works")


def _summary(config: Config) -> str:
    tables: dict[str, Iterable[PluginTable]] = {
        "l1": [config.l1.memory],
        "eviction": [config.l1.eviction],
        "l2": [l2.tier for l2 in config.l2],
        "hasher": [config.hasher],
        "transport": config.transport,
        "layout": config.layout,
        "requests": config.requests,
        "listener": config.listeners,
    }
    return ", ".join(f"{name} {'+'.join(table.use for table in named)}" for name, named in tables.items() if named)


@app.command(
    "show",
    epilog=examples(
        "kvframework config show",
        "kvframework config show --config kvf.toml --set l1.capacity=8GiB",
        "kvframework config show > kvf.toml          a file to start from",
    ),
)
def show(config: ConfigFile = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show every value in force, including the plugins' options, with its origin.

    The output is TOML. Secrets are masked: passwords in URLs, and the options that a plugin marks as secret.
    """
    layers = read_layers(config, overrides or (), os.environ)
    view = view_config(layers, assemble(layers), PluginRegistry())
    if as_json:
        print_document(view)
    else:
        stdout.print(as_toml(view, width=stdout.width if stdout.is_terminal else None), markup=False)


class ShownValue(msgspec.Struct, frozen=True):
    key: str
    value: object
    origin: str


class ShownTable(msgspec.Struct, frozen=True):
    """`table` is a title such as "[[l2]] #1"; `plugin` is "" for a table of the core alone."""

    table: str
    plugin: str
    values: list[ShownValue]


class ConfigView(msgspec.Struct, frozen=True):
    """`empty` lists the tables and arrays of tables that are not there, with their origins."""

    source: str
    by_environment: bool
    empty: list[ShownValue]
    tables: list[ShownTable]


def view_config(layers: Layers, config: Config, registry: PluginRegistry) -> ConfigView:
    """Blocking: imports the plugins that the configuration names, and creates no object of theirs. Raises `PluginError`
    and `ConfigFieldError` like `check_config`: of a plugin that is not here the secret options are not known."""
    view = ConfigView(layers.source, layers.by_variable, [], [])

    def add(name: str, values: dict[str, object], plugin: str = "", number: int | None = None) -> None:
        title = f"[{name}]" if number is None else f"[[{name}]] #{number + 1}"
        path = (*name.split(".", 1), *(() if number is None else (number,)))
        shown = [ShownValue(key, value, layers.origin((*path, key), title)) for key, value in values.items()]
        view.tables.append(ShownTable(title, plugin, shown))

    def add_plugin(
        name: str,
        table: PluginTable,
        descriptor: type[Provider[Any]],
        own: msgspec.Struct | None = None,
        number: int | None = None,
    ) -> None:
        options = shown_options(resolve_table(registry, table, descriptor)[1])
        named = {"use": table.use} if "use" in table.core_keys else {}
        core = msgspec.structs.asdict(own) if own is not None else {}
        add(name, named | options | core, f"{descriptor.kind}.{table.use}", number)

    def add_array(name: str, tables: Sequence[PluginTable], descriptor: type[Provider[Any]]) -> None:
        for number, table in enumerate(tables):
            add_plugin(name, table, descriptor, number=number)
        lack_array(name, tables)

    def lack_array(name: str, tables: Sequence[object]) -> None:
        if not tables:
            view.empty.append(ShownValue(name, [], layers.origin((name,), f"[[{name}]]") or FIELD_DEFAULT))

    def lack(name: str, table: object) -> None:
        if not table:
            view.empty.append(ShownValue(name, None, FIELD_DEFAULT))

    server = shown_options(config.server)
    del server["curve"]
    add("server", server | {"endpoint": server["endpoint"] or default_endpoint()})
    if config.server.curve is not None:
        add("server.curve", shown_options(config.server.curve))
    add("log", shown_options(config.log))
    if config.observe is not None:
        add("observe", shown_options(config.observe))
    if config.events is not None:
        add_plugin("events", config.events, ListenerProvider)
    lack("observe", config.observe)
    lack("events", config.events)
    add_plugin("l1", config.l1.memory, MemoryProvider, config.l1.keys)
    add_plugin("l1.eviction", config.l1.eviction, EvictionProvider)
    add_plugin("hasher", config.hasher, HasherProvider)
    add_array("transport", config.transport, AnyTransportProvider)
    add_array("layout", config.layout, LayoutProvider)
    add_array("requests", config.requests, RequestsProvider)
    add_array("listener", config.listener, ListenerProvider)
    for number, l2 in enumerate(config.l2):
        add_plugin("l2", l2.tier, TierProvider, l2.keys, number)
    lack_array("l2", config.l2)
    add("codecs", {"allow": list(config.codecs.allow)})
    for table in codec_tables(config):
        options = shown_options(resolve_table(registry, table, CodecProvider)[1])
        add(f"codecs.{table.use}", options, f"codec.{table.use}")
    for tenant in config.tenants:
        add(f"tenants.{tenant.name}", msgspec.structs.asdict(tenant.keys))
    lack("tenants", config.tenants)
    return view


def as_toml(view: ConfigView, width: int | None = None) -> str:
    """Return the view as TOML with the same meaning, with the origins as comments: behind the values, or above them
    where the line would exceed `width`."""
    named = ", named by KVFRAMEWORK_CONFIG" if view.by_environment else ""
    lines = [f"# {view.source}{named}", *_aligned(view.empty, width)]
    for table in view.tables:
        title = table.table.partition(" #")[0]
        lines += ["", f"{title}  # {table.plugin}" if table.plugin else title, *_aligned(table.values, width)]
    return "\n".join(lines)


def _aligned(values: Iterable[ShownValue], most: int | None) -> list[str]:
    """Return `key = value # origin` lines with the comments aligned."""
    said = [(_line(value), value.origin) for value in values]
    width = min(max((cell_len(line) for line, _ in said), default=0), 48)
    lines: list[str] = []
    for line, origin in said:
        whole = f"{line}{' ' * (width - cell_len(line))}  # {origin}"
        lines += [whole] if most is None or cell_len(whole) <= most else [f"# {origin}", line]
    return lines


def _line(value: ShownValue) -> str:
    try:
        return f"{value.key} = {toml_value(value.value)}"
    except TypeError:  # TOML cannot express it, such as None
        return f"# {value.key} = {'not set' if value.value is None else value.value}"


@app.command(
    "apply",
    epilog=examples(
        "kvframework config apply kvf.toml --dry-run   what differs",
        "kvframework config apply kvf.toml             all of it, or nothing",
        "kvframework config apply kvf.toml --set log.level=debug",
    ),
)
def apply(
    file: _File = None,
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
                "this server is older: its configuration changes by a restart only", where=client.endpoint
            ) from None
    if as_json:
        print_document(applied)
    else:
        _show_changes(applied, dry_run=dry_run)
    if not all(each.now for each in applied.changes):
        raise typer.Exit(EXIT_FOUND)


def _show_changes(applied: m.ConfigApplied, *, dry_run: bool) -> None:
    """Print a row for each key that differs, and what has come of it."""
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
        print_text("nothing differs")
    elif waiting:
        print_text(f"nothing has changed: {waiting} of {len(rows)} need a restart")
    else:
        print_text("nothing has changed: a dry run" if dry_run else f"applied: {len(rows)} changed")
