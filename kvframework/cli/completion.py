"""What TAB offers for `--set`, `--l2` and plugin names. A mistake in the configuration, or a plugin that fails, prints
or does not come back, means fewer offers, no error.

Whole keys are offered, never the beginning of one: bash sets a space behind what it completes.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvframework.config import CurveConfig, LogConfig, ObserveConfig, ServerConfig, read_layers
from kvframework.config.schema import L1Keys, L2Keys
from kvframework.registry import PluginRegistry
from kvframework.registry.discovery import discover
from kvframework.registry.options import OptionInfo, describe_options

PLUGINS_S = 2.0  # of all of them together

_ARRAYS = {"transport": "transport", "layout": "layout", "l2": "tier", "requests": "requests"}


def override_words(parameters: Mapping[str, Any], incomplete: str) -> list[str]:
    """Return the `TABLE.KEY=` that begin so, or behind a `=` the values of that key. `parameters` are those of the
    command so far: its configuration decides which plugins are meant. Imports plugins."""
    with _guarded():
        registry = PluginRegistry()
        return _words(dict(_keys(_raw(parameters), registry)), incomplete)
    return []


def option_words(kind: str, name: str, incomplete: str) -> list[str]:
    """Return the `KEY=` of one plugin that begin so, or behind a `=` its values. Imports the plugin."""
    with _guarded():
        return _words(dict(_of_plugin("", kind, name, PluginRegistry())), incomplete)
    return []


def plugin_words(incomplete: str) -> list[str]:
    """Return the `KIND.NAME` that begin so, from metadata alone."""
    return sorted({offer.title for offer in discover() if offer.title.startswith(incomplete)})


def tier_words(incomplete: str) -> list[str]:
    """Return the values of the demo's `--l2` that begin so, from metadata alone."""
    names = {offer.name for offer in discover() if offer.kind == "tier"} - {"filesystem"}
    return [name for name in sorted({"disk", *names}) if name.startswith(incomplete)]


def _words(keys: Mapping[str, list[str]], incomplete: str) -> list[str]:
    key, equals, _ = incomplete.partition("=")
    if equals:
        offered: Iterable[str] = (f"{key}={value}" for value in keys.get(key, ()))
    else:
        offered = (f"{name}=" for name in keys)
    return sorted(word for word in offered if word.startswith(incomplete))


def _raw(parameters: Mapping[str, Any]) -> dict[str, Any]:
    path = parameters.get("config") or parameters.get("file")
    overrides = [each for each in parameters.get("overrides") or () if "=" in each]
    for file, environ in ((path, os.environ), (None, {})):
        for given in (overrides, []):
            with contextlib.suppress(Exception):
                return read_layers(Path(file) if file else None, given, environ).raw
    return {}


def _keys(raw: dict[str, Any], registry: PluginRegistry) -> Iterator[tuple[str, list[str]]]:
    yield from _of_struct("server", ServerConfig)
    yield from _of_struct("server.curve", CurveConfig)
    yield from _of_struct("log", LogConfig)
    yield from _of_struct("observe", ObserveConfig)
    yield "codecs.allow", []
    l1 = _table(raw.get("l1"))
    yield from _of_struct("l1", L1Keys)
    yield from _of_table("l1", "memory", l1, registry)
    yield from _of_table("l1.eviction", "eviction", _table(l1.get("eviction")), registry)
    yield from _of_table("hasher", "hasher", _table(raw.get("hasher")), registry)
    for array, kind in _ARRAYS.items():
        tables = raw.get(array)
        tables = tables if isinstance(tables, list) else []
        for index, table in enumerate(tables):
            if array == "l2":
                yield from _of_struct(f"l2.{index}", L2Keys)
            yield from _of_table(f"{array}.{index}", kind, _table(table), registry)
        yield f"{array}.{len(tables)}.use", registry.names(kind)


def _of_table(
    prefix: str, kind: str, table: dict[str, Any], registry: PluginRegistry
) -> Iterator[tuple[str, list[str]]]:
    yield f"{prefix}.use", registry.names(kind)
    yield from _of_plugin(f"{prefix}.", kind, str(table.get("use", "")), registry)


def _of_plugin(prefix: str, kind: str, name: str, registry: PluginRegistry) -> list[tuple[str, list[str]]]:
    with contextlib.suppress(Exception, SystemExit):
        _, provider = registry.describe(kind, name)
        if provider is not None:
            return [(prefix + option.name, _values(option)) for option in describe_options(provider.options)]
    return []


def _of_struct(prefix: str, struct: type[msgspec.Struct]) -> list[tuple[str, list[str]]]:
    return [
        (f"{prefix}.{option.name}", _values(option)) for option in describe_options(struct) if option.type != "table"
    ]


def _values(option: OptionInfo) -> list[str]:
    if option.type == "boolean":
        return ["true", "false"]
    return [word.strip('"') for word in option.type.split(" or ") if word.startswith('"')]


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Keep away from the shell what plugins print, and in whichever way they end. One that takes too long ends the
    process: nothing else ends it for sure."""
    handler = signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, PLUGINS_S)
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGALRM, handler)
        stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        nowhere = stack.enter_context(open(os.devnull, "w"))
        for number in (1, 2):
            kept = os.dup(number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            os.dup2(nowhere.fileno(), number)
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        stack.enter_context(contextlib.suppress(Exception, SystemExit))
        yield
