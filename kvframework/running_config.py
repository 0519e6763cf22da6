"""The configuration of a running server: how it differs from another, which keys change at once, and the change."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from kvframework.api.requests import ClientInfo, Handler
from kvframework.api.toml import toml_value
from kvframework.bounded_calls import call_bounded
from kvframework.config.load import Layers, assemble
from kvframework.config.schema import CodecsConfig, Config, PluginTable, TenantConfig
from kvframework.errors import KVFrameworkError, RequestError
from kvframework.masking import secrets_of, shown, shown_options
from kvframework.preflight import refusals
from kvframework.registry.registry import PluginRegistry
from kvframework.registry.tables import complete_config, named_tables, resolve_table
from kvframework.service.contexts import check_own_user
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS

# The keys that a running server changes; any other needs a restart. A number in the place of a table is left out.
_CHANGED_NOW = {
    "log": "level format",
    "server": "store_lease_s retrieve_lease_s store_share pin_share ticket_s price session_timeout_s trace_memory",
    "l1": "high_watermark low_watermark",
    "l2": "timeout_s write_queue promote high_watermark low_watermark",
}
CHANGED_NOW = frozenset(f"{table}.{key}" for table, keys in _CHANGED_NOW.items() for key in keys.split())
# Fields of the schema whose keys stand in the table around them.
_INLINE = ("memory", "tier", "keys")


def changes(old: Config, new: Config) -> dict[str, bool]:
    """The keys whose values differ, such as `l2.0.timeout_s`, as `--set` names them, in the order of `old`; and whether
    a running server changes each. Both are complete (`complete_config`), as options are compared as they stand."""
    before, after = flat(old), flat(new)
    return {
        key: key in before and key in after and changes_now(key)
        for key in before | after
        if before.get(key) != after.get(key)
    }


def changes_now(key: str) -> bool:
    """Whether a running server changes the key. An unknown one, such as an option of a plugin, needs a restart."""
    return ".".join(part for part in key.split(".") if not part.isdecimal()) in CHANGED_NOW


def flat(config: Config) -> dict[str, object]:
    """Every value by its key as `--set` names it, None for one that is not set."""
    return {key: value for key, value in _keys("", config) if key != "source"}


def _keys(path: str, value: object) -> Iterator[tuple[str, object]]:
    prefix = f"{path}." if path else ""
    if isinstance(value, PluginTable):
        if "use" in value.core_keys:
            yield f"{prefix}use", value.use
        yield from ((f"{prefix}{name}", each) for name, each in value.options.items())
    elif isinstance(value, CodecsConfig):
        yield f"{prefix}allow", value.allow
        for table in value.options:
            yield from ((f"{prefix}{table.use}.{name}", each) for name, each in table.options.items())
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _keys(path if name in _INLINE else f"{prefix}{name}", getattr(value, name))
    elif isinstance(value, tuple) and any(isinstance(each, msgspec.Struct) for each in value):
        tables = [each for each in value if path != "listener" or "use" in each.core_keys]  # [events] and [control] not
        yield from (pair for each in value if each not in tables for pair in _keys(each.use, each))
        for index, each in enumerate(tables):
            named = isinstance(each, TenantConfig)
            yield from _keys(f"{prefix}{each.name if named else index}", each.keys if named else each)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _keys(f"{prefix}{name}", each)
    else:
        yield path, value


log = logging.getLogger(__name__)


class RunningConfig:
    """Thread-safe. `configure` makes the server's objects work by a configuration that differs in keys that change
    while it runs; it must not fail. The constructor raises `PluginError` and `ConfigFieldError`."""

    def __init__(self, config: Config, registry: PluginRegistry, configure: Callable[[Config], None]) -> None:
        self._given = config
        self._complete = complete_config(config, registry)
        self._registry = registry
        self._configure = configure
        self._lock = threading.Lock()

    def handlers(self) -> list[Handler]:  # type: ignore[type-arg]
        return [Handler(REQUESTS["APPLY_CONFIG"], self._apply, pooled=True, ordered=True)]

    def shown(self) -> dict[str, object]:
        """Return every value in force by its key, secrets masked. Blocking: plugins say what is secret."""
        return shown_config(self._given, self._registry)

    def secrets(self) -> set[str]:
        return secrets_of_plugins(self._given, self._registry)

    def apply(self, config: Config, *, dry_run: bool = False) -> m.ConfigApplied:
        """Change to `config`, all of it or nothing: nothing with `dry_run`, or if any key needs a restart. Raises the
        first error with which a server of this configuration would refuse to start. Blocking: imports plugins."""

        def completed() -> Config:
            for refusal in refusals(config, self._registry, replaces=os.getpid()):
                raise refusal
            return complete_config(config, self._registry)

        complete = call_bounded(completed)
        with self._lock:
            before, after = self.shown(), shown_config(config, self._registry)
            rows = tuple(
                m.ConfigChange(key, _text(before.get(key)), _text(after.get(key)), now)
                for key, now in changes(self._complete, complete).items()
            )
            applied = not dry_run and all(each.now for each in rows)
            if applied and rows:
                self._configure(config)
                self._given, self._complete = config, complete
                log.info("configuration: %s", "; ".join(f"{each.key} = {each.new}, was {each.old}" for each in rows))
            return m.ConfigApplied(rows, applied)

    def _apply(self, client: ClientInfo, payload: m.ApplyConfig, _buffers: Sequence[memoryview]) -> m.ConfigApplied:
        check_own_user(client, "change the configuration")
        try:
            raw = msgspec.json.decode(payload.config, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"the configuration cannot be read: {error}", where=payload.source[:256]) from None
        layers = Layers({"l1": {}, "hasher": {}} | raw, {}, {}, Path(payload.source), False, ())
        return self.apply(assemble(layers), dry_run=payload.dry_run)


def secrets_of_plugins(config: Config, registry: PluginRegistry) -> set[str]:
    """Return the texts that `shown_config` hides, and all texts of a table that fits no plugin. Blocking."""
    found: set[str] = set()
    for table, descriptor in named_tables(config):
        try:
            found |= secrets_of(resolve_table(registry, table, descriptor)[1])
        except KVFrameworkError:
            found |= {value for value in table.options.values() if isinstance(value, str)}
    return found


def shown_config(config: Config, registry: PluginRegistry) -> dict[str, object]:
    """Return every value by its key, defaults too, secrets masked. Blocking; raises as `complete_config`."""
    return {key: shown(value) for key, value in flat(complete_config(config, registry, shown_options)).items()}


def _text(value: object) -> str:
    try:
        return "" if value is None else toml_value(value)
    except TypeError:  # TOML cannot express it
        return str(value)
