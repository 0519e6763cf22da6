"""The comparison of versions: of the plugin API, of which the group of the entry point carries the major and a provider
the minor; and of the release that a plugin's distribution asks for."""

from __future__ import annotations

import re
from importlib import metadata
from itertools import zip_longest

import kvframework
from kvframework.api.plugin import API_VERSION
from kvframework.errors import PluginBroken, PluginWrongApi

API_TEXT = ".".join(map(str, API_VERSION))
_OURS = "kvframework"
# A requirement with a marker, such as that of an extra, is not judged, nor one of a distribution with a longer name.
_REQUIREMENT = re.compile(rf"{_OURS}(?![\w.-])\s*(?:\[[^]]*\])?\s*\(?([^;()]*)\)?\s*", re.IGNORECASE)
_CLAUSE = re.compile(r"\s*(~=|==|!=|<=|>=|<|>)\s*v?(\d+(?:\.\d+)*)(\.\*)?(\S*)\s*")


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


def release_wanted(distribution: str) -> str:
    """Return the range of kvframework's releases that an installed distribution asks for, if this release is not in
    it, else "". Blocking: reads a metadata file."""
    if distribution == _OURS:
        return ""
    try:
        requirements = metadata.requires(distribution) or ()
    except metadata.PackageNotFoundError:
        return ""
    ranges = [match[1].strip() for each in requirements if (match := _REQUIREMENT.fullmatch(each.strip()))]
    return next((each for each in ranges if not _admits(each, kvframework.__version__)), "")


def check_release(distribution: str, title: str) -> None:
    """Raises `PluginWrongApi` for a plugin whose distribution asks for another release. pip installs none; a later
    change of kvframework, or `--no-deps`, leads to it. Blocking."""
    if wanted := release_wanted(distribution):
        raise PluginWrongApi(
            f"{title} needs {_OURS} {wanted}",
            available=f"{_OURS} {kvframework.__version__}",
            hint="install a release of the plugin for this kvframework, or another kvframework",
        )


def _admits(wanted: str, present: str) -> bool:
    """Whether a range has a version. A development version counts as its release; what is no plain clause admits all.

    pip judges more exactly, and at each installation."""
    have = _release(present)
    for clause in wanted.split(","):
        match = _CLAUSE.fullmatch(clause)
        if match is None:
            continue
        operator, text, wildcard, suffix = match.groups()
        want = _release(text)
        order = _order(have[: len(want)] if wildcard else have, want)
        if suffix and order == 0:
            continue  # a development version of this release
        fits = {
            "==": order == 0,
            "!=": order != 0,
            ">=": order >= 0,
            "<=": order <= 0,
            ">": order > 0,
            "<": order < 0,
            "~=": order >= 0 and have[: len(want) - 1] == want[:-1],
        }
        if not fits[operator]:
            return False
    return True


def _release(version: str) -> list[int]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return [int(each) for each in found[0].split(".")] if found else []


def _order(one: list[int], other: list[int]) -> int:
    pairs = zip_longest(one, other, fillvalue=0)
    return next(((a > b) - (a < b) for a, b in pairs if a != b), 0)


def _wrong(title: str, needed: str) -> PluginWrongApi:
    return PluginWrongApi(
        f"{title} is written for plugin API {needed}",
        available=f"plugin API {API_TEXT}",
        hint="install a release of the plugin for this kvframework, or another kvframework",
    )
