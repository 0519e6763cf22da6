"""The names of a new plugin, and the names that are refused. Reads the metadata of installed distributions; imports
none of them."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass

from kvframework.registry import KINDS, discover
from kvframework.scaffold.errors import NameRefused

_LONGEST = 32
_WORDS = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class PluginNames:
    """`name` is the plugin's name in a TOML: `use = "my_store"`. The others follow from it."""

    kind: str
    name: str

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
    def test_extras(self) -> str:
        """The extras of kvframework that its tests need: the kits, and torch where KV is made of tensors."""
        return "testing,torch" if self.kind in ("layout", "transport") else "testing"


def choose_names(kind: str, name: str) -> PluginNames:
    """The names of a new plugin. Raises `NameRefused`. Blocking: reads the metadata of what is installed."""
    if kind not in KINDS:
        raise NameRefused(f"there is no kind {kind!r}", where="KIND", available=", ".join(KINDS))
    if not _WORDS.fullmatch(name) or len(name) > _LONGEST:
        meant = _repaired(name)
        raise NameRefused(
            f"{name!r} cannot be the name of a plugin",
            where="NAME",
            available=f"lower-case letters, digits and single underscores between them, at most {_LONGEST}",
            hint=f"did you mean {meant}?" if meant else "choose one such as my_store",
        )
    names = PluginNames(kind, name)
    for offer in discover():
        if (offer.kind, offer.name) == (kind, name):
            raise NameRefused(
                f"{offer.origin} offers {names.title} already",
                where="NAME",
                hint="choose another name: of two plugins with one name neither can be used",
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


def _repaired(name: str) -> str:
    """The nearest allowed name, "" if there is none."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip()).lower().removeprefix("kvf-").removeprefix("kvf_")
    tried = re.sub(r"[^a-z0-9]+", "_", spaced).strip("_")[:_LONGEST].rstrip("_")
    return tried if _WORDS.fullmatch(tried) else ""
