"""Plugin machinery: static discovery, guarded loading, one registry. Used by server, client and CLI at startup."""

from kvframework.registry.check import (
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
from kvframework.registry.discovery import KINDS, EntryPointInfo, discover
from kvframework.registry.registry import AnyProvider, PluginInfo, PluginRegistry

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
