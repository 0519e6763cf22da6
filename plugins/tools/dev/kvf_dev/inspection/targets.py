"""The meaning of `MODULE|KIND.NAME`: the module to inspect, and its installed entry points. Imports nothing of a
plugin."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from msgspec import Struct

from kvframework.errors import ConfigFieldError, PluginNotFound
from kvframework.registry import KINDS, EntryPointInfo, PluginRegistry, discover


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
