"""Loading of `Config` from the layers of a configuration. Once, at startup."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from kvframework.api.endpoint import ObserveConfig, collector_url, parse_endpoint, parse_listen
from kvframework.api.toml import convert, unknown_key
from kvframework.config.layers import CONFIG_VARIABLE, DEFAULT_EVICTION, Layers, read_layers
from kvframework.config.schema import (
    CodecName,
    CodecsConfig,
    Config,
    L1Config,
    L1Keys,
    L2Config,
    L2Keys,
    LogConfig,
    PluginTable,
    ServerConfig,
    TenantConfig,
    TenantKeys,
)
from kvframework.config.tenants import tenants_of
from kvframework.errors import ConfigFieldError, EndpointError

__all__ = ["CONFIG_VARIABLE", "assemble", "load_config"]

_K = TypeVar("_K", L1Keys, L2Keys)


class _Allow(msgspec.Struct, frozen=True):
    allow: tuple[CodecName, ...] = ()


_TABLES = (
    "server",
    "log",
    "l1",
    "transport",
    "layout",
    "l2",
    "codecs",
    "hasher",
    "requests",
    "listener",
    "observe",
    "events",
    "tenants",
)


def load_config(
    path: Path | None = None, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> Config:
    """Reads `path`, else the file that `KVFRAMEWORK_CONFIG` names, else takes the embedded default.

    `overrides` are `table.key=value` texts, applied in order. Blocking. Raises `ConfigFileError`, `ConfigFieldError`
    and `EndpointError`; plugins are neither imported nor called, see `kvframework.registry.check`.
    """
    return assemble(read_layers(path, overrides, environ))


def assemble(layers: Layers) -> Config:
    """The configuration of the merged layers. Pure. Raises `ConfigFieldError` and `EndpointError`."""
    raw, where = layers.raw, layers.where
    for key in raw:
        if key not in _TABLES:
            raise unknown_key(key, _TABLES, where=where)
    server = _server(_table(raw.get("server", {}), f"{where}: [server]"), f"{where}: [server]")
    events, listener = _listeners(raw, where)
    return Config(
        server=server,
        log=convert(_table(raw.get("log", {}), f"{where}: [log]"), LogConfig, where=f"{where}: [log]"),
        l1=_l1(_table(raw["l1"], f"{where}: [l1]"), where),
        transport=_named_once(_plugins(raw, "transport", where)),
        layout=_named_once(_plugins(raw, "layout", where)),
        l2=_l2s(raw, where),
        codecs=_codecs(_table(raw.get("codecs", {}), f"{where}: [codecs]"), f"{where}: [codecs]"),
        hasher=_plugin(_table(raw["hasher"], f"{where}: [hasher]"), f"{where}: [hasher]"),
        requests=_named_once(_plugins(raw, "requests", where)),
        source=layers.source,
        tenants=_tenants(_table(raw.get("tenants", {}), f"{where}: [tenants]"), where),
        observe=_observe(raw["observe"], f"{where}: [observe]") if "observe" in raw else None,
        events=events,
        listener=listener,
    )


def _server(table: dict[str, object], where: str) -> ServerConfig:
    server = convert(table, ServerConfig, where=where)
    if server.endpoint and parse_endpoint(server.endpoint, where=f"{where} endpoint").kind == "tcp":
        _check_secure(server, f"{where} endpoint")
        if server.admit_uids:
            raise EndpointError(
                "admit_uids is about a local socket, and the endpoint is none",
                where=f"{where} admit_uids",
                hint="name an ipc:// endpoint, or leave admit_uids out: over TCP, [server.curve] admits clients",
            )
    if server.tcp:
        if parse_endpoint(server.tcp, where=f"{where} tcp").kind != "tcp":
            raise EndpointError("not an endpoint of other hosts", where=f"{where} tcp", available="tcp://HOST:PORT")
        _check_secure(server, f"{where} tcp")
    return server


def _check_secure(server: ServerConfig, where: str) -> None:
    """Refuses tcp:// without CURVE keys unless `insecure` is set: no server exposes the KV of prompts to a network by
    accident. Raises `EndpointError`."""
    if server.curve is None and not server.insecure:
        raise EndpointError(
            "tcp:// needs CURVE keys, or insecure = true",
            where=where,
            available="[server.curve] secret_key = FILE, clients = DIR; or [server] insecure = true",
            hint="make keys with: kvframework keys new DIR",
        )
    if server.curve is not None and server.insecure:
        raise EndpointError(
            "insecure = true contradicts [server.curve]", where=where, hint="leave one of them out of the file"
        )


def _observe(value: object, where: str) -> ObserveConfig:
    observe = convert(_table(value, where), ObserveConfig, where=where)
    parse_listen(observe.listen, where=f"{where} listen")
    if bool(observe.tls_cert) != bool(observe.tls_key):
        raise ConfigFieldError("tls_cert and tls_key go together", where=where, hint="give both, or none")
    if observe.traces:
        collector_url(observe.traces, where=where)
    return observe


def _listeners(raw: dict[str, object], where: str) -> tuple[PluginTable | None, tuple[PluginTable, ...]]:
    """The table `[events]`, which is that of the listener of this name, and the others."""
    listener, events = _plugins(raw, "listener", where), None
    if "events" in raw:
        place = f"{where}: [events]"
        events = PluginTable("events", _table(raw["events"], place), place, ())
    _named_once((events, *listener) if events else listener)
    return events, listener


def _l1(table: dict[str, object], where: str) -> L1Config:
    place = f"{where}: [l1]"
    own, rest = _split(table, L1Keys, place)
    _check_watermarks(own, place)
    eviction = _table(rest.pop("eviction", {}), f"{where}: [l1.eviction]")
    core_keys = ("use", "eviction", *L1Keys.__struct_fields__)
    return L1Config(
        memory=_plugin(rest, place, core_keys),
        eviction=_plugin({"use": DEFAULT_EVICTION} | eviction, f"{where}: [l1.eviction]"),
        high_watermark=own.high_watermark,
        low_watermark=own.low_watermark,
        ghosts=own.ghosts,
        keep=own.keep,
    )


def _l2s(raw: dict[str, object], where: str) -> tuple[L2Config, ...]:
    tiers = tuple(_l2(table, place) for table, place in _array(raw, "l2", where))
    high = convert(_core(_table(raw["l1"], f"{where}: [l1]"), L1Keys), L1Keys, where=f"{where}: [l1]").high_watermark
    for tier in tiers:
        if tier.keys.write_policy == "write_back" and high >= 1.0:
            raise ConfigFieldError(
                'write_policy = "write_back" needs L1 to evict before it is full',
                where=tier.tier.where,
                available="[l1] high_watermark below 1.0",
                hint="write high_watermark = 0.9 and low_watermark = 0.8 into [l1]",
            )
    return tiers


def _l2(table: dict[str, object], where: str) -> L2Config:
    own, rest = _split(table, L2Keys, where)
    _check_watermarks(own, where)
    return L2Config(_plugin(rest, where, ("use", *L2Keys.__struct_fields__)), own)


def _codecs(table: dict[str, object], where: str) -> CodecsConfig:
    allow = convert({"allow": table.get("allow", [])}, _Allow, where=where).allow
    place = where.removesuffix("]")
    options = [
        PluginTable(name, _table(value, f"{place}.{name}]"), f"{place}.{name}]", ())
        for name, value in table.items()
        if name != "allow"
    ]
    return CodecsConfig(allow, tuple(options), where)


def _tenants(tables: dict[str, object], where: str) -> tuple[TenantConfig, ...]:
    places = {name: f"{where}: [tenants.{name}]" for name in tables}
    return tenants_of(
        [
            TenantConfig(name, convert(_table(table, places[name]), TenantKeys, where=places[name]), places[name])
            for name, table in tables.items()
        ]
    )


def _check_watermarks(keys: L1Keys | L2Keys, where: str) -> None:
    if keys.low_watermark > keys.high_watermark:
        raise ConfigFieldError(
            f"low_watermark {keys.low_watermark} is above high_watermark {keys.high_watermark}",
            where=where,
            available="0 < low_watermark <= high_watermark <= 1",
        )


def _split(table: dict[str, object], keys: type[_K], where: str) -> tuple[_K, dict[str, object]]:
    """The core's own keys of a plugin's table, validated, and the remaining keys, which belong to the plugin."""
    own = _core(table, keys)
    return convert(own, keys, where=where), {key: value for key, value in table.items() if key not in own}


def _core(table: dict[str, object], keys: type[_K]) -> dict[str, object]:
    return {key: value for key, value in table.items() if key in keys.__struct_fields__}


def _plugin(table: dict[str, object], where: str, core_keys: tuple[str, ...] = ("use",)) -> PluginTable:
    use = table.get("use")
    if not isinstance(use, str) or not use:
        raise ConfigFieldError(
            "`use` must name a plugin" if "use" in table else "`use` is missing: it names the plugin",
            where=where,
            hint='write use = "name"; `kvframework plugins list` shows the names',
        )
    return PluginTable(use, {key: value for key, value in table.items() if key != "use"}, where, core_keys)


def _plugins(raw: dict[str, object], name: str, where: str) -> tuple[PluginTable, ...]:
    return tuple(_plugin(table, place) for table, place in _array(raw, name, where))


def _named_once(tables: tuple[PluginTable, ...]) -> tuple[PluginTable, ...]:
    seen: dict[str, PluginTable] = {}
    for table in tables:
        first = seen.setdefault(table.use, table)
        if first is not table:
            raise ConfigFieldError(f"{table.use!r} is named twice, first in {first.where}", where=table.where)
    return tables


def _array(raw: dict[str, object], name: str, where: str) -> list[tuple[dict[str, object], str]]:
    tables = raw.get(name, [])
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
