"""Plugin machinery: static discovery, guarded loading, one registry. Used by server, client and CLI at startup."""

from kvframework.plugins.check import check_config, codec_tables, resolve_table
from kvframework.plugins.discovery import EntryPointInfo, discover
from kvframework.plugins.kinds import KINDS
from kvframework.plugins.registry import PluginInfo, PluginRegistry

__all__ = [
    "KINDS",
    "EntryPointInfo",
    "PluginInfo",
    "PluginRegistry",
    "check_config",
    "codec_tables",
    "discover",
    "resolve_table",
]
