"""The meaning of `MODULE|KIND.NAME`: the module to inspect, and its installed entry points; and the checks of its
distribution's metadata. Imports nothing of a plugin."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from msgspec import Struct

import kvframework
from kvf_dev.inspection.problems import Problem, problem
from kvframework.api.plugin import API_VERSION, ENTRY_POINT_GROUP
from kvframework.errors import ConfigFieldError, PluginNotFound
from kvframework.registry import KINDS, EntryPointInfo, PluginRegistry, discover
from kvframework.registry.discovery import name_fault, release_wanted


class Target(Struct, frozen=True):
    """One inspection. `module` is imported, `attribute` of it holds the hooks ("" for the module itself). `offers` are
    its entry points; `rivals` those of other distributions for the same names. `chosen` limits the inspection to one
    provider, and `options` are passed to its `create`."""

    module: str
    attribute: str
    offers: list[EntryPointInfo]
    rivals: list[EntryPointInfo]
    chosen: str = ""
    options: dict[str, Any] = {}

    @property
    def value(self) -> str:
        """The value of the entry point."""
        return f"{self.module}:{self.attribute}" if self.attribute else self.module


def find_targets(text: str, options: Mapping[str, object]) -> list[Target]:
    """One for each distribution that offers KIND.NAME, or for each object that entry points name in MODULE.

    Raises `PluginNotFound`, `PluginWrongKind`, and `ConfigFieldError` for `options` of no single plugin. Blocking:
    reads metadata.
    """
    installed = discover()
    kind, _, name = text.partition(".")
    if options and not (kind in KINDS and name):
        raise ConfigFieldError(
            "options are those of one plugin",
            where=f"--set {next(iter(options))}",
            available="KIND.NAME",
            hint="name the plugin as `kvframework plugins list` shows it, not its module",
        )
    if kind in KINDS and name:
        named = [offer for offer in installed if (offer.kind, offer.name) == (kind, name)]
        if not named:
            PluginRegistry(installed).resolve(kind, name)  # the error names the available ones
        return [_target(offer.value, installed, offer.title, options) for offer in named]
    values = dict.fromkeys(offer.value for offer in installed if _module(offer.value) == text)
    if values:
        return [_target(value, installed) for value in values]
    if not _exists(text):
        raise PluginNotFound(
            f"{text!r} is neither an installed plugin nor a module",
            available=", ".join(sorted({offer.title for offer in installed})) or "no plugin is installed",
            hint="give KIND.NAME as `kvframework plugins list` shows it, or a module that this Python can import",
        )
    return [Target(text, "", [], [])]


def _target(
    value: str, installed: list[EntryPointInfo], chosen: str = "", options: Mapping[str, object] | None = None
) -> Target:
    offers = [offer for offer in installed if offer.value == value]
    titles = {offer.title for offer in offers if not chosen or offer.title == chosen}
    owners = {offer.distribution for offer in offers}
    rivals = [offer for offer in installed if offer.title in titles and offer.distribution not in owners]
    attribute = value.partition(":")[2].partition("[")[0].strip()
    return Target(_module(value), attribute, offers, rivals, chosen, dict(options or {}))


def _module(value: str) -> str:
    return value.partition(":")[0].partition("[")[0].strip()


def _exists(module: str) -> bool:
    """Checks the first part of the name only: checking further parts would import it."""
    root = module.partition(".")[0]
    return root.isidentifier() and find_spec(root) is not None


_OURS = "kvframework"


def metadata_problems(target: Target) -> Iterator[Problem]:
    """Problems of the metadata. Blocking: reads metadata files."""
    if not target.offers:
        yield problem(
            "not-installed",
            target.module,
            "no installed distribution has an entry point for it",
            expected=f'[project.entry-points."{ENTRY_POINT_GROUP}"]',
            hint="install the plugin: pip install -e .",
        )
    for rival in target.rivals:
        yield problem(
            "name-conflict",
            rival.title,
            f"{rival.origin} offers it too",
            expected="a name of its own",
            hint="choose another name, or uninstall the other one",
        )
    for offer in target.offers:
        if offer.api_major != API_VERSION[0] and offer.title not in {
            each.title for each in target.offers if each.api_major == API_VERSION[0]
        }:
            yield problem(
                "api-version",
                offer.title,
                f"its entry point is of plugin API {offer.api_major}",
                expected=f"the group {ENTRY_POINT_GROUP}",
                hint="offer it in this group as well",
            )
        if offer.kind not in KINDS:
            yield problem(
                "entry-point-name",
                offer.title,
                "its entry point names no kind of plugin",
                expected=f"KIND.NAME, with one of {', '.join(KINDS)}",
                hint="rename the entry point",
            )
        elif fault := name_fault(offer.kind, offer.name):
            yield problem(
                "plugin-name",
                offer.title,
                fault.fact,
                expected=fault.available,
                hint=f"call it {offer.kind}.{fault.nearest}" if fault.nearest else "choose another name",
            )
    for name in dict.fromkeys(offer.distribution for offer in target.offers):
        yield from _distribution_problems(name)


def _distribution_problems(name: str) -> Iterator[Problem]:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return
    if not found.metadata["Requires-Python"]:
        yield problem(
            "no-requires-python",
            name,
            "its metadata has no Requires-Python",
            expected='requires-python = ">=3.10"',
            hint="write it into [project] of pyproject.toml",
        )
    if wanted := release_wanted(name):
        yield problem(
            "api-version",
            name,
            f"it requires kvframework {wanted}",
            expected=f"a range with kvframework {kvframework.__version__}",
            hint="widen the range in its pyproject.toml, or check it with a kvframework in the range",
        )
    needed = {re.split(r"[^A-Za-z0-9._-]", each.strip(), maxsplit=1)[0].lower() for each in found.requires or ()}
    if _OURS not in {*needed, name.lower()}:
        yield problem(
            "no-dependency",
            name,
            "its metadata does not depend on kvframework",
            expected='dependencies = ["kvframework>=..."]',
            hint="write it into [project] of pyproject.toml",
        )
