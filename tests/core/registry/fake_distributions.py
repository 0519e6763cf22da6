"""Makes installed distributions on disk: real metadata and modules, as an installer would leave them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

from kvframework.registry.registry import PluginInfo, PluginRegistry

HOOKS = (
    "from kvframework.api.codec import CodecProvider, hookimpl\n"
    "from kvframework.api.eviction import EvictionProvider\n"
    "from kvframework.api.tier import TierProvider\n"
)


def install(
    site: Path,
    name: str,
    entry_points: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
    *,
    version: str = "1.0",
    group: str = "kvframework.v1",
    metadata: str = "",
) -> None:
    """Adds a distribution to `site`; a second call of the same name adds another group to it. `metadata` are further
    lines of its METADATA."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")
    with (info / "entry_points.txt").open("a") as file:
        file.write(f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entry_points.items()))
    for module, source in (modules or {}).items():
        (site / f"{module}.py").write_text(textwrap.dedent(source))


def codec_module(*names: str, extra: str = "") -> str:
    providers = ", ".join(
        f'CodecProvider(name="{name}", summary="fake", create=lambda options: None)' for name in names
    )
    return f"{HOOKS}{extra}\n@hookimpl\ndef kvf_codecs():\n    return [{providers}]\n"


def marking(marker: Path) -> str:
    """Source that proves an import: it adds a line to a file."""
    return f"with open({str(marker)!r}, 'a') as file:\n    file.write(__name__ + '\\n')\n"


def info(registry: PluginRegistry, kind: str, name: str, *, probe: bool = False) -> PluginInfo:
    (found,) = (line for line in registry.list(probe=probe) if (line.kind, line.name) == (kind, name))
    return found
