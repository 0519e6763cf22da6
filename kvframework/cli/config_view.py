"""The view behind `kvframework config show`: every value in force with its origin, secrets masked. It creates no
plugin's objects, but imports the plugins that the configuration names, since only they know their options."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from kvframework.api.codec import CodecProvider
from kvframework.api.eviction import EvictionProvider
from kvframework.api.hasher import HasherProvider
from kvframework.api.layout import LayoutProvider
from kvframework.api.listener import ListenerProvider
from kvframework.api.memory import MemoryProvider
from kvframework.api.plugin import Provider
from kvframework.api.requests import RequestsProvider
from kvframework.api.tier import TierProvider
from kvframework.api.transport import AnyTransportProvider
from kvframework.cli.console import print_table, print_text
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
    read_layers,
    toml_value,
)
from kvframework.errors import UnknownRequest, VersionMismatch
from kvframework.masking import HIDDEN, shown_options
from kvframework.registry import PluginRegistry, codec_tables, resolve_table
from kvframework.wire import messages as m

KeyPath = tuple[str | int, ...]
_NO_KEYS: Mapping[str, object] = MappingProxyType({})


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
    """`empty` lists the arrays of tables that have no table, with their origins."""

    source: str
    by_environment: bool
    empty: list[ShownValue]
    tables: list[ShownTable]


def view_config(layers: Layers, config: Config, registry: PluginRegistry) -> ConfigView:
    """Blocking: may import plugins. Raises `PluginError` and `ConfigFieldError` like `check_config`: the options of a
    plugin that is not here cannot be shown, since its secret options are not known."""
    view = _View(layers, registry)
    server = shown_options(config.server)
    server |= {"endpoint": server["endpoint"] or default_endpoint()}
    del server["curve"]
    view.core(("server",), "[server]", server)
    if config.server.curve is not None:
        view.core(("server", "curve"), "[server.curve]", shown_options(config.server.curve))
    view.core(("log",), "[log]", shown_options(config.log))
    if config.observe is not None:
        view.core(("observe",), "[observe]", shown_options(config.observe))
    else:
        view.empty.append(ShownValue("observe", None, FIELD_DEFAULT))
    if config.events is not None:
        _, options = resolve_table(registry, config.events, ListenerProvider)
        view.core(("events",), "[events]", shown_options(options), plugin="listener.events")
    else:
        view.empty.append(ShownValue("events", None, FIELD_DEFAULT))
    l1, eviction = config.l1, config.l1.eviction
    own = {"high_watermark": l1.high_watermark, "low_watermark": l1.low_watermark, "ghosts": l1.ghosts, "keep": l1.keep}
    view.plugin(("l1",), "[l1]", l1.memory, MemoryProvider, own)
    view.plugin(("l1", "eviction"), "[l1.eviction]", eviction, EvictionProvider)
    view.plugin(("hasher",), "[hasher]", config.hasher, HasherProvider)
    view.array("transport", config.transport, AnyTransportProvider)
    view.array("layout", config.layout, LayoutProvider)
    view.array("requests", config.requests, RequestsProvider)
    view.array("listener", config.listener, ListenerProvider)
    for index, l2 in enumerate(config.l2):
        view.plugin(("l2", index), f"[[l2]] #{index + 1}", l2.tier, TierProvider, msgspec.structs.asdict(l2.keys))
    if not config.l2:
        view.nothing("l2")
    view.core(("codecs",), "[codecs]", {"allow": list(config.codecs.allow)})
    for table in codec_tables(config):
        _, options = resolve_table(registry, table, CodecProvider)
        view.core(("codecs", table.use), f"[codecs.{table.use}]", shown_options(options), plugin=f"codec.{table.use}")
    if not config.tenants:
        view.empty.append(ShownValue("tenants", None, FIELD_DEFAULT))
    for tenant in config.tenants:
        view.core(("tenants", tenant.name), f"[tenants.{tenant.name}]", msgspec.structs.asdict(tenant.keys))
    return ConfigView(layers.source, layers.by_variable, view.empty, view.tables)


def as_toml(view: ConfigView, width: int | None = None) -> str:
    """Return the view as TOML with the same meaning, with the origins as comments: behind the values, or above them
    where the line would exceed `width`."""
    named = ", named by KVFRAMEWORK_CONFIG" if view.by_environment else ""
    lines = [f"# {view.source}{named}", *_aligned(view.empty, width)]
    for table in view.tables:
        title = table.table.partition(" #")[0]
        lines += ["", f"{title}  # {table.plugin}" if table.plugin else title, *_aligned(table.values, width)]
    return "\n".join(lines)


class _View:
    def __init__(self, layers: Layers, registry: PluginRegistry) -> None:
        self.tables: list[ShownTable] = []
        self.empty: list[ShownValue] = []
        self._layers = layers
        self._registry = registry

    def core(self, path: KeyPath, title: str, values: dict[str, object], plugin: str = "") -> None:
        shown = [ShownValue(key, value, self._layers.origin((*path, key), title)) for key, value in values.items()]
        self.tables.append(ShownTable(title, plugin, shown))

    def plugin(
        self,
        path: KeyPath,
        title: str,
        table: PluginTable,
        descriptor: type[Provider[Any]],
        core: Mapping[str, object] = _NO_KEYS,
    ) -> None:
        _, options = resolve_table(self._registry, table, descriptor)
        values = {"use": table.use} | shown_options(options) | dict(core)
        self.core(path, title, values, plugin=f"{descriptor.kind}.{table.use}")

    def array(self, name: str, tables: tuple[PluginTable, ...], descriptor: type[Provider[Any]]) -> None:
        for index, table in enumerate(tables):
            self.plugin((name, index), f"[[{name}]] #{index + 1}", table, descriptor)
        if not tables:
            self.nothing(name)

    def nothing(self, name: str) -> None:
        origin = self._layers.origin((name,), f"[[{name}]]")
        self.empty.append(ShownValue(name, [], origin or FIELD_DEFAULT))


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


CONNECT_S = 5.0


def ask_for_changes(
    file: Path | None, overrides: Sequence[str], endpoint: str | None, *, dry_run: bool, timeout_s: float
) -> m.ConfigApplied:
    """Send the configuration to its server. Blocks for `timeout_s` at most. Raises what reading a configuration and
    `KVClient` raise, and the server's own error about it."""
    layers = read_layers(file, overrides, os.environ)
    config = assemble(layers)
    asked = m.ApplyConfig(msgspec.json.encode(layers.raw), layers.where, dry_run)
    endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or config.server.endpoint or default_endpoint()
    quiet_connection()
    with KVClient(endpoint, name="config", connect_timeout_s=min(timeout_s, CONNECT_S)) as client:
        _ = client.hello
        try:
            return client.request("APPLY_CONFIG", asked, m.ConfigApplied, timeout=timeout_s)
        except UnknownRequest:
            raise VersionMismatch(
                "this server is older: its configuration changes by a restart only", where=client.endpoint
            ) from None


def show_changes(applied: m.ConfigApplied, *, dry_run: bool) -> None:
    """Print a row for each key that differs, and what has come of it."""
    if applied.changes:
        table = Table(box=None, pad_edge=False)
        for title in ("KEY", "RUNNING", "NEW", "CHANGES"):
            table.add_column(title, overflow="fold")
        for each in applied.changes:
            old, new = (value or "not set" for value in (each.old, each.new))
            if HIDDEN in each.old and each.old == each.new:
                new = "another secret"
            when = Text("now", "green") if each.now else Text("needs restart", "yellow")
            table.add_row(Text(each.key), Text(old), Text(new), when)
        print_table(table)
    print_text(_outcome(applied, dry_run=dry_run))


def _outcome(applied: m.ConfigApplied, *, dry_run: bool) -> str:
    if not applied.changes:
        return "nothing differs"
    waiting = sum(not each.now for each in applied.changes)
    if waiting:
        return f"nothing has changed: {waiting} of {len(applied.changes)} need a restart"
    return "nothing has changed: a dry run" if dry_run else f"applied: {len(applied.changes)} changed"
