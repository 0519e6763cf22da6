"""Loading of `Config`, once, at startup, from its layers: default, file, then `--set table.key=value`, with origins."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from kvframework.api.endpoint import ObserveConfig, collector_url, parse_endpoint, parse_listen
from kvframework.api.toml import MOST_LEVELS, MOST_SHOWN, convert, parse_toml, read_toml, unknown_key
from kvframework.config import schema
from kvframework.config.tenants import check_tenants
from kvframework.errors import ConfigFieldError, ConfigFileError, EndpointError

_K = TypeVar("_K", schema.L1Keys, schema.L2Keys)
# The tables of a file that come in arrays, and all.
ARRAYS = ("transport", "layout", "l2", "requests", "listener")
# Tables of the listeners that have these names.
OF_LISTENERS = ("events", "control")
_TABLES = ("server", "log", "l1", "codecs", "hasher", "observe", *OF_LISTENERS, "tenants", *ARRAYS)


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
    named = (schema.PluginTable(name, tables[name], f"{where}: [{name}]", ()) for name in OF_LISTENERS if name in raw)
    plugins["listener"] = (*named, *plugins["listener"])
    for tables_of_kind in plugins.values():
        _check_named_once(tables_of_kind)
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
                "insecure = true contradicts [server.curve]", where=f"{where} {name}", hint="leave out one of the two"
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
        fact = "`use` must name a plugin" if "use" in table else "`use` is missing, which names the plugin"
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


_HINT = "write table.key=value, for example l1.capacity=4GiB or l2.0.url=redis://localhost"


def apply_override(raw: dict[str, object], override: str) -> None:
    """Set one value in `raw`, and create missing tables. A number indexes an array of tables; one past its end
    appends. Raises `ConfigFieldError` if the override is malformed or its path does not exist."""
    keys, text = override_keys(override), override.partition("=")[2]
    node: object = raw
    for key, following in pairwise(keys):
        empty: object = [] if following.isdecimal() else {}
        if isinstance(node, dict):
            node = node.setdefault(key, empty)
        elif isinstance(node, list):
            index = _index(node, key, override)
            node[index:] = node[index:] or [empty]
            node = node[index]
        else:
            raise _refusal(override, f"leads through {key!r}, which lies in a value, not in a table")
    value, last = parse_value(text.strip()), keys[-1]
    if isinstance(node, dict):
        node[last] = value
    elif isinstance(node, list):
        index = _index(node, last, override)
        node[index : index + 1] = [value]
    else:
        raise _refusal(override, f"sets {last!r} in a value, not in a table")


def override_keys(override: str) -> tuple[str, ...]:
    """The path that an override sets. Raises `ConfigFieldError` if it is malformed."""
    path, separator, _ = override.partition("=")
    keys = tuple(key.strip() for key in path.split("."))
    if not separator or not all(keys):
        raise _refusal(override, "is not of the form table.key=value")
    if len(keys) > MOST_LEVELS:
        raise _refusal(override, f"names a key {len(keys)} levels deep", available=f"at most {MOST_LEVELS}")
    return keys


def parse_value(text: str) -> object:
    """`text` as a TOML value if it is one, else as a string."""
    try:
        parsed = parse_toml(f"value = {text}", where="")
    except (ConfigFileError, ConfigFieldError):
        return text
    # A line break in the text could have smuggled in further keys.
    return parsed["value"] if len(parsed) == 1 else text


def _index(node: list[object], key: str, override: str) -> int:
    if not (key.isascii() and key.isdecimal()) or int(key) > len(node):
        raise _refusal(override, f"uses {key!r} as the index of {len(node)} items", available=f"0 to {len(node)}")
    return int(key)


def _refusal(override: str, fact: str, available: str = "") -> ConfigFieldError:
    # The value may be a secret.
    where = f"--set {override.partition('=')[0][:MOST_SHOWN]}"
    return ConfigFieldError(f"the override {fact}", where=where, available=available, hint=_HINT)


DEFAULT_SOURCE = "embedded default"
DEFAULT_EVICTION = "two_queues"
DEFAULT_TOML = f"""
[server]
# endpoint: a private ipc:// socket, see kvframework.config.endpoint

[l1]
use = "pinned"
capacity = "1GiB"

[l1.eviction]
use = "{DEFAULT_EVICTION}"

[hasher]
use = "sha256"

[[transport]]
use = "cpu_gather"

[[layout]]
use = "paged"

[[layout]]
use = "opaque"

[[layout]]
use = "dynamic_cache"
"""
CONFIG_VARIABLE = "KVFRAMEWORK_CONFIG"
# The origin of a value that no layer sets: the default of its field.
FIELD_DEFAULT = "default"
KeyPath = tuple[str | int, ...]


class Layers(NamedTuple):
    """The layers. `raw` is the merged configuration. `by_variable`: the environment named the file."""

    raw: dict[str, object]
    own: dict[str, object]
    default: dict[str, object]
    file: Path | None
    by_variable: bool
    overrides: tuple[str, ...]

    @property
    def source(self) -> str:
        return str(self.file) if self.file is not None else DEFAULT_SOURCE

    @property
    def where(self) -> str:
        return f"{self.source} with --set" if self.overrides else self.source

    def origin(self, path: KeyPath, table: str) -> str:
        """The origin of the value at `path`; `table` is the title of its table, such as "[[l2]] #1". Never shows a
        value, which may be secret."""
        keys = tuple(str(key) for key in path)
        for override in reversed(self.overrides):
            changed = override_keys(override)
            if changed == keys[: len(changed)] or keys == changed[: len(keys)]:
                return f"--set {'.'.join(changed)}"
        if self.file is not None and _contains(self.own, path):
            return f"{self.source}{f' ({CONFIG_VARIABLE})' if self.by_variable else ''}: {table}"
        fell_back = self.file is None or not _contains(self.own, path[:1]) or path[-1] in ("use", "eviction")
        return DEFAULT_SOURCE if fell_back and _contains(self.default, path) else FIELD_DEFAULT


def read_layers(path: Path | None, overrides: Sequence[str], environ: Mapping[str, str]) -> Layers:
    """Read the layers. Blocking. Raises `ConfigFileError` and `ConfigFieldError` (of a malformed override)."""
    by_variable = path is None and bool(environ.get(CONFIG_VARIABLE))
    if by_variable:
        path = Path(environ[CONFIG_VARIABLE])
    layers = layers_of(read_toml(path) if path is not None else {})
    for override in overrides:
        apply_override(layers.raw, override)
    return layers._replace(file=path, by_variable=by_variable, overrides=tuple(overrides))


def layers_of(own: dict[str, object]) -> Layers:
    """The layers of what a file says, or would say. Missing tables are taken whole from the default. A table in the
    file keeps its own keys; only its choice of plugin may be left out."""
    default = parse_toml(DEFAULT_TOML, where=DEFAULT_SOURCE)
    merged = default | own
    for name in ("l1", "hasher"):
        table, fallback = merged[name], default[name]
        if isinstance(table, dict) and isinstance(fallback, dict):
            merged[name] = {key: fallback[key] for key in ("use", "eviction") if key in fallback} | table
    # Overrides change tables in place, and the lower layers must stay unchanged.
    return Layers(copy.deepcopy(merged), own, default, None, False, ())


def _contains(node: object, path: KeyPath) -> bool:
    for key in path:
        inside = key in node if isinstance(node, dict) else isinstance(node, list) and int(key) < len(node)
        if not inside:
            return False
        node = node[key]  # type: ignore[index]
    return True
