"""Plugin machinery: static discovery, guarded loading, one registry. Used by server, client and CLI at startup."""

from kvframework.registry.discovery import KINDS, EntryPointInfo, discover
from kvframework.registry.plugin_check import AnyProvider
from kvframework.registry.registry import PluginInfo, PluginRegistry
from kvframework.registry.tables import (
    OptionInfo,
    check_config,
    check_table,
    codec_tables,
    complete_config,
    describe_options,
    named_tables,
    resolve_table,
    server_terms,
)

__all__ = [
    "KINDS",
    "AnyProvider",
    "EntryPointInfo",
    "OptionInfo",
    "PluginInfo",
    "PluginRegistry",
    "check_config",
    "check_table",
    "codec_tables",
    "complete_config",
    "describe_options",
    "discover",
    "named_tables",
    "resolve_table",
    "server_terms",
]
