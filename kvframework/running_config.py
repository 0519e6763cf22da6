"""The configuration of a running server: how it differs from another one, and the change to that."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvframework.api.requests import ClientInfo, Handler
from kvframework.config import Config, Layers, assemble, changes, flat, toml_value
from kvframework.errors import RequestError
from kvframework.masking import secrets_of, shown, shown_options
from kvframework.overdue import call_bounded
from kvframework.preflight import refusals
from kvframework.registry import PluginRegistry, complete_config, named_tables, resolve_table
from kvframework.service.operator_requests import check_own_user
from kvframework.wire import messages as m
from kvframework.wire.protocol import REQUESTS

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
        """Return the texts that `shown` hides."""
        found: set[str] = set()
        for table, descriptor in named_tables(self._given):
            found |= secrets_of(resolve_table(self._registry, table, descriptor)[1])
        return found

    def apply(self, config: Config, *, dry_run: bool = False) -> m.ConfigApplied:
        """Change to `config`, all of it or nothing: nothing with `dry_run`, or if any key needs a restart. Raises the
        first error with which a server of this configuration would refuse to start. Blocking: imports plugins; one that
        does not return is such an error."""

        def completed() -> Config:
            for refusal in refusals(config, self._registry, replaces=os.getpid()):
                raise refusal
            return complete_config(config, self._registry)

        complete = call_bounded(completed)
        with self._lock:
            found = changes(self._complete, complete)
            before, after = self.shown(), shown_config(config, self._registry)
            told = tuple(
                m.ConfigChange(each.key, _text(before.get(each.key)), _text(after.get(each.key)), each.when == "now")
                for each in found
            )
            applied = not dry_run and all(each.now for each in told)
            if applied and found:
                self._configure(config)
                self._given, self._complete = config, complete
                log.info("configuration: %s", "; ".join(f"{each.key} = {each.new}, was {each.old}" for each in told))
            return m.ConfigApplied(told, applied)

    def _apply(self, client: ClientInfo, payload: m.ApplyConfig, _buffers: Sequence[memoryview]) -> m.ConfigApplied:
        check_own_user(client, "change the configuration")
        try:
            raw = msgspec.json.decode(payload.config, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"no configuration: {error}", where=payload.source[:256]) from None
        layers = Layers({"l1": {}, "hasher": {}} | raw, {}, {}, Path(payload.source), False, ())
        return self.apply(assemble(layers), dry_run=payload.dry_run)


def shown_config(config: Config, registry: PluginRegistry) -> dict[str, object]:
    """Return every value of a configuration by its key, defaults too, secrets masked. Blocking: plugins say what is
    secret. Raises like `check_config`."""
    return {key: shown(value) for key, value in flat(complete_config(config, registry, shown_options)).items()}


def _text(value: object) -> str:
    try:
        return "" if value is None else toml_value(value)
    except TypeError:  # TOML cannot express it
        return str(value)
