"""The names of a new plugin, the names that are refused, and the errors of `kvframework new`: after any of them nothing
has been written. Reads the metadata of installed distributions; imports none of them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib import metadata

from kvframework.errors import KVFrameworkError
from kvframework.registry import KINDS, discover
from kvframework.registry.discovery import name_fault


class ScaffoldError(KVFrameworkError, RuntimeError, code="scaffold.failed"):
    """The folder of a new plugin cannot be written.

    What to do: choose a folder that you may write to with `--path`.
    """


class NameRefused(ScaffoldError, ValueError, code="scaffold.name"):
    """The kind does not exist, or the name cannot be that of a plugin, or is taken here.

    What to do: choose a name of lower-case letters, digits and underscores that no other plugin has.
    """


class FolderExists(ScaffoldError, FileExistsError, code="scaffold.exists"):
    """There is something at the place of the new folder already.

    What to do: choose another name or `--path`; nothing is ever written over.
    """


# Kind and option of each variant of the plain plugin, and the folders of its templates: a later one's file stands in
# the place of an earlier one's.
VARIANTS = {("tier", "helper"): ("tier", "tier-helper"), ("transport", "driver"): ("transport-driver",)}
# The plain plugins that have more than the folder of their kind.
_PLAIN = {"layout": ("torch", "layout"), "transport": ("torch", "transport")}


@dataclass(frozen=True)
class PluginNames:
    """`name` is the plugin's name in a TOML: `use = "my_store"`. The others follow from it. `variant` is one of
    `VARIANTS`, "" for the plain plugin of its kind."""

    kind: str
    name: str
    variant: str = ""

    @property
    def distribution(self) -> str:
        """The name of the distribution, in normal form: `kvf-my-store`."""
        return f"kvf-{self.name.replace('_', '-')}"

    @property
    def module(self) -> str:
        """The name of the package: `kvf_my_store`."""
        return f"kvf_{self.name}"

    @property
    def class_prefix(self) -> str:
        """The first part of its classes' names: `MyStore`."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def title(self) -> str:
        """Its entry point: `tier.my_store`."""
        return f"{self.kind}.{self.name}"

    @property
    def templates(self) -> tuple[str, ...]:
        """The folders of its own templates, beside the shared ones."""
        return VARIANTS[self.kind, self.variant] if self.variant else _PLAIN.get(self.kind, (self.kind,))

    @property
    def test_requirements(self) -> dict[str, tuple[str, ...]]:
        """The distributions that its tests need, with their extras: the kits, and torch where KV is made of tensors."""
        torch = {"kvframework": ("torch",)} if self.kind in ("layout", "transport") else {}
        return {"kvframework-dev": (), **torch}


def choose_names(kind: str, name: str, *variants: str) -> PluginNames:
    """The names of a new plugin; of `variants` no kind has two. Raises `NameRefused`. Blocking: reads the metadata of
    what is installed."""
    if kind not in KINDS:
        raise NameRefused(f"there is no kind {kind!r}", where="KIND", available=", ".join(KINDS))
    if fault := name_fault(kind, name):
        raise NameRefused(
            fault.fact,
            where="NAME",
            available=fault.available,
            hint=f"did you mean {fault.nearest}?" if fault.nearest else "choose one such as my_store",
        )
    for variant in variants:
        if (kind, variant) not in VARIANTS:
            raise NameRefused(
                f"the kind {kind} has no --{variant}",
                where=f"--{variant}",
                available=", ".join(f"{each} --{option}" for each, option in VARIANTS),
                hint=f"leave --{variant} out",
            )
    names = PluginNames(kind, name, *variants)
    for offer in discover():
        if (offer.kind, offer.name) == (kind, name):
            raise NameRefused(
                f"{offer.origin} offers {names.title} already",
                where="NAME",
                hint="choose another name: of two plugins with one name neither can be used",
            )
    if installed := _version(names.distribution):
        raise NameRefused(
            f"there is a distribution {names.distribution} already",
            where="NAME",
            available=f"its version {installed} is installed here",
            hint="choose another name: the new one would be installed in its place",
        )
    found = importlib.util.find_spec(names.module)
    if found is not None:
        raise NameRefused(
            f"there is a module {names.module} already",
            where="NAME",
            available=f"it is at {found.origin}",
            hint="choose another name: only one of the two modules would be found",
        )
    return names


def _version(distribution: str) -> str:
    """The installed version of a distribution, "" if there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
