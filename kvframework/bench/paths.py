"""Owns the choice of the path that a transport's bytes take: over the arena, or over the wire."""

from __future__ import annotations

import enum

from kvframework.bench.errors import BenchUnavailable
from kvframework.registry.registry import PluginRegistry

TRANSPORT = "cpu_gather"
_OPTION = "path"


class Path(str, enum.Enum):
    arena = "arena"
    wire = "wire"


def transport_options(path: Path, plugins: PluginRegistry) -> dict[str, object]:
    """What makes the transport take `path`. Raises `BenchUnavailable` if it has no choice and takes another one."""
    provider = plugins.resolve("transport", TRANSPORT, where="bench store")
    if _OPTION in provider.options.__struct_fields__:
        return {_OPTION: path.value}
    if path is Path.arena:
        return {}
    raise BenchUnavailable(
        f"the {path.value} path is not in this server",
        where=f"transport {TRANSPORT}",
        available=Path.arena.value,
        hint="bench --path arena",
    )
