"""Owns the check of a configuration against the plugins: does every table name a plugin that works and fit it?"""

from __future__ import annotations

from typing import Any, TypeVar

from kvframework.api import (
    CodecProvider,
    EvictionProvider,
    HasherProvider,
    L1Provider,
    LayoutProvider,
    Options,
    Provider,
    RequestsProvider,
    TierProvider,
    TransportProvider,
)
from kvframework.config import Config, PluginTable
from kvframework.errors import PluginWrongKind
from kvframework.plugins.registry import PluginRegistry

NO_CODEC = "none"

P = TypeVar("P", bound=Provider[Any])


def resolve_table(registry: PluginRegistry, table: PluginTable, role: type[P]) -> tuple[P, Options]:
    """The provider that a table names, and its validated options. Blocking: may import the plugin.

    `role` is the descriptor that the place needs: `[l1]` takes an `L1Provider`, `[[l2]]` a `TierProvider`. Raises
    `PluginError` and `ConfigFieldError` with the table's place.
    """
    provider = registry.resolve(role.kind, table.use, where=table.where)
    if not isinstance(provider, role):
        raise PluginWrongKind(
            f"{table.use!r} is a {role.kind} of another class: {type(provider).__name__}",
            where=table.where,
            available=f"plugins with {role.__name__}",
            hint="[l1] takes memory such as pinned, [[l2]] a store such as redis",
        )
    return provider, registry.options(provider, table.options, where=table.where, core_keys=table.core_keys)


def check_config(config: Config, registry: PluginRegistry) -> None:
    """Resolves every configured plugin and validates its options; creates nothing. Blocking.

    Raises the first error: `PluginError` or `ConfigFieldError`.
    """
    resolve_table(registry, config.l1.memory, L1Provider)
    resolve_table(registry, config.l1.eviction, EvictionProvider)
    resolve_table(registry, config.hasher, HasherProvider)
    for table in config.transport:
        resolve_table(registry, table, TransportProvider)
    for table in config.layout:
        resolve_table(registry, table, LayoutProvider)
    for l2 in config.l2:
        resolve_table(registry, l2.tier, TierProvider)
        if l2.codec != NO_CODEC:
            resolve_table(registry, PluginTable(l2.codec, {}, f"{l2.tier.where} codec"), CodecProvider)
    for table in config.requests:
        resolve_table(registry, table, RequestsProvider)
