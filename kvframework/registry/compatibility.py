"""The comparison of plugin API versions: the group of the entry point carries the major, a provider the minor."""

from __future__ import annotations

import re

from kvframework.api.plugin import API_VERSION
from kvframework.errors import PluginBroken, PluginWrongApi

API_TEXT = ".".join(map(str, API_VERSION))


def check_major(major: int, title: str) -> None:
    """Raises `PluginWrongApi` if an entry point is in the group of another major."""
    if major != API_VERSION[0]:
        raise _wrong(title, f"version {major}")


def check_requires(requires_api: object, title: str) -> None:
    """Raises `PluginWrongApi` if a provider needs more than this version offers, `PluginBroken` for a malformed
    version."""
    if not isinstance(requires_api, str) or not (match := re.fullmatch(r"(\d+)\.(\d+)", requires_api)):
        raise PluginBroken(f"{title}: requires_api is {requires_api!r}", available='a version such as "1.0"')
    major, minor = int(match[1]), int(match[2])
    if major != API_VERSION[0] or minor > API_VERSION[1]:
        raise _wrong(title, f"version {requires_api}")


def _wrong(title: str, needed: str) -> PluginWrongApi:
    return PluginWrongApi(
        f"{title} is written for plugin API {needed}",
        available=f"plugin API {API_TEXT}",
        hint="install a release of the plugin for this kvframework, or another kvframework",
    )
