"""Plugin machinery: static discovery, guarded loading, one registry. Used by server, client and CLI at startup."""

from kvframework.registry.check import (
    check_config,
    check_table,
    codec_tables,
    complete_config,
    named_tables,
    resolve_table,
    server_terms,
)
from kvframework.registry.discovery import KINDS, EntryPointInfo, discover
from kvframework.registry.registry import PluginInfo, PluginRegistry

__all__ = [
    "KINDS",
    "EntryPointInfo",
    "PluginInfo",
    "PluginRegistry",
    "check_config",
    "check_table",
    "codec_tables",
    "complete_config",
    "discover",
    "named_tables",
    "resolve_table",
    "server_terms",
]
