"""Loading of `Config` from the layers of a configuration. Once, at startup."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from kvframework.api.endpoint import ObserveConfig, collector_url, parse_endpoint, parse_listen
from kvframework.api.toml import convert, unknown_key
from kvframework.config import schema
from kvframework.config.layers import DEFAULT_EVICTION, Layers, read_layers
from kvframework.config.tenants import check_tenants
from kvframework.errors import ConfigFieldError, EndpointError

_K = TypeVar("_K", schema.L1Keys, schema.L2Keys)
# The tables of a file that come in arrays, and all.
ARRAYS = ("transport", "layout", "l2", "requests", "listener")
_TABLES = ("server", "log", "l1", "codecs", "hasher", "observe", "events", "tenants", *ARRAYS)


class _Allow(msgspec.Struct, frozen=True):
    allow: tuple[schema.CodecName, ...] = ()


def load_config(
    path: Path | None = None, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> schema.Config:
    """Read `path`, else the file that `KVFRAMEWORK_CONFIG` names, else takes the embedded default.

    `overrides` are `table.key=value` texts, applied in order. Blocking. Raises `ConfigFileError`, `ConfigFieldError`
    and `EndpointError`; plugins are neither imported nor called, see `kvframework.registry.tables`."""
    return assemble(read_layers(path, overrides, environ))


def assemble(layers: Layers) -> schema.Config:
    """The configuration of the merged layers. Pure. Raises `ConfigFieldError` and `EndpointError`."""
    raw, where = layers.raw, layers.where
    for key in raw:
        if key not in _TABLES:
            raise unknown_key(key, _TABLES, where=where)
    tables = {name: _table(raw.get(name, {}), f"{where}: [{name}]") for name in _TABLES if name not in ARRAYS}
    arrays = {name: _array(raw.get(name, []), name, where) for name in ARRAYS}
    plugins = {name: tuple(_plugin(table, place) for table, place in arrays[name]) for name in ARRAYS if name != "l2"}
    events = schema.PluginTable("events", tables["events"], f"{where}: [events]", ()) if "events" in raw else None
    for named in (plugins["transport"], plugins["layout"], plugins["requests"]):
        _check_named_once(named)
    _check_named_once((events, *plugins["listener"]) if events else plugins["listener"])
    l1 = _l1(tables["l1"], where)
    return schema.Config(
        server=_server(tables["server"], f"{where}: [server]"),
        log=convert(tables["log"], schema.LogConfig, where=f"{where}: [log]"),
        l1=l1,
        transport=plugins["transport"],
        layout=plugins["layout"],
        l2=tuple(_l2(table, place, l1.keys) for table, place in arrays["l2"]),
        codecs=_codecs(tables["codecs"], where),
        hasher=_plugin(tables["hasher"], f"{where}: [hasher]"),
        requests=plugins["requests"],
        source=layers.source,
        tenants=_tenants(tables["tenants"], where),
        observe=_observe(tables["observe"], f"{where}: [observe]") if "observe" in raw else None,
        events=events,
        listener=plugins["listener"],
    )


def _server(table: dict[str, object], where: str) -> schema.ServerConfig:
    server = convert(table, schema.ServerConfig, where=where)
    over_tcp = bool(server.endpoint) and parse_endpoint(server.endpoint, where=f"{where} endpoint").kind == "tcp"
    if over_tcp and server.admit_uids:
        fact = "admit_uids needs a local socket, and the endpoint is not one"
        hint = "set an ipc:// endpoint, or leave out admit_uids and admit TCP clients by [server.curve]"
        raise EndpointError(fact, where=f"{where} admit_uids", hint=hint)
    if server.tcp and parse_endpoint(server.tcp, where=f"{where} tcp").kind != "tcp":
        raise EndpointError("the endpoint is not a TCP endpoint", where=f"{where} tcp", available="tcp://HOST:PORT")
    # No server exposes the KV of prompts to a network by accident.
    for name in [*(["endpoint"] if over_tcp else []), *(["tcp"] if server.tcp else [])]:
        if server.curve is None and not server.insecure:
            raise EndpointError(
                "a tcp:// endpoint needs CURVE keys, or insecure = true",
                where=f"{where} {name}",
                available="[server.curve] secret_key = FILE, clients = DIR; or [server] insecure = true",
                hint="make keys with: kvframework keys new DIR",
            )
        if server.curve is not None and server.insecure:
            raise EndpointError(
                "insecure = true contradicts [server.curve]", where=f"{where} {name}", hint="leave out one of them"
            )
    return server


def _observe(table: dict[str, object], where: str) -> ObserveConfig:
    observe = convert(table, ObserveConfig, where=where)
    parse_listen(observe.listen, where=f"{where} listen")
    if bool(observe.tls_cert) != bool(observe.tls_key):
        raise ConfigFieldError("tls_cert and tls_key need each other", where=where, hint="set both, or none")
    if observe.traces:
        collector_url(observe.traces, where=where)
    return observe


def _l1(table: dict[str, object], where: str) -> schema.L1Config:
    keys, rest = _split(table, schema.L1Keys, f"{where}: [l1]")
    eviction = _table(rest.pop("eviction", {}), f"{where}: [l1.eviction]")
    core_keys = ("use", "eviction", *schema.L1Keys.__struct_fields__)
    memory = _plugin(rest, f"{where}: [l1]", core_keys)
    return schema.L1Config(memory, _plugin({"use": DEFAULT_EVICTION} | eviction, f"{where}: [l1.eviction]"), keys)


def _l2(table: dict[str, object], where: str, l1: schema.L1Keys) -> schema.L2Config:
    keys, rest = _split(table, schema.L2Keys, where)
    tier = _plugin(rest, where, ("use", *schema.L2Keys.__struct_fields__))
    if keys.write_policy == "write_back" and l1.high_watermark >= 1.0:
        fact = 'write_policy = "write_back" needs L1 to evict before it is full'
        hint = "write high_watermark = 0.9 and low_watermark = 0.8 into [l1]"
        raise ConfigFieldError(fact, where=where, available="[l1] high_watermark below 1.0", hint=hint)
    return schema.L2Config(tier, keys)


def _split(table: dict[str, object], keys: type[_K], where: str) -> tuple[_K, dict[str, object]]:
    """The core's own keys of a plugin's table, validated, and the remaining keys, which belong to the plugin."""
    own = {key: value for key, value in table.items() if key in keys.__struct_fields__}
    core = convert(own, keys, where=where)
    if core.low_watermark > core.high_watermark:
        fact = f"low_watermark {core.low_watermark} is above high_watermark {core.high_watermark}"
        raise ConfigFieldError(fact, where=where, available="0 < low_watermark <= high_watermark <= 1")
    return core, {key: value for key, value in table.items() if key not in own}


def _codecs(table: dict[str, object], where: str) -> schema.CodecsConfig:
    allow = convert({"allow": table.get("allow", [])}, _Allow, where=f"{where}: [codecs]").allow
    places = {name: f"{where}: [codecs.{name}]" for name in table if name != "allow"}
    options = (schema.PluginTable(name, _table(table[name], place), place, ()) for name, place in places.items())
    return schema.CodecsConfig(allow, tuple(options), f"{where}: [codecs]")


def _tenants(tables: dict[str, object], where: str) -> tuple[schema.TenantConfig, ...]:
    places = {name: f"{where}: [tenants.{name}]" for name in tables}
    tenants = tuple(
        schema.TenantConfig(name, convert(_table(tables[name], place), schema.TenantKeys, where=place), place)
        for name, place in places.items()
    )
    check_tenants(tenants)
    return tenants


def _plugin(table: dict[str, object], where: str, core_keys: tuple[str, ...] = ("use",)) -> schema.PluginTable:
    use = table.get("use")
    if not isinstance(use, str) or not use:
        fact = "`use` must name a plugin" if "use" in table else "`use` is missing: it names the plugin"
        raise ConfigFieldError(fact, where=where, hint='write use = "name"; `kvframework plugins list` shows the names')
    return schema.PluginTable(use, {key: value for key, value in table.items() if key != "use"}, where, core_keys)


def _check_named_once(tables: tuple[schema.PluginTable, ...]) -> None:
    seen: dict[str, schema.PluginTable] = {}
    for table in tables:
        first = seen.setdefault(table.use, table)
        if first is not table:
            raise ConfigFieldError(f"{table.use!r} is configured twice, first in {first.where}", where=table.where)


def _array(tables: object, name: str, where: str) -> list[tuple[dict[str, object], str]]:
    if not isinstance(tables, list):
        raise ConfigFieldError(
            f"expected an array of tables, found {_kind(tables)}", where=f"{where}: {name}", hint=f"write [[{name}]]"
        )
    places = [f"{where}: [[{name}]] #{number}" for number in range(1, len(tables) + 1)]
    return [(_table(table, place), place) for table, place in zip(tables, places, strict=True)]


def _table(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigFieldError(f"expected a table, found {_kind(value)}", where=where)
    return value


def _kind(value: object) -> str:
    return {dict: "a table", list: "an array", str: "a string", bool: "a boolean"}.get(type(value), repr(value))
