"""A new plugin's distribution, complete and working, from the templates in this package. Runs in the command's process.

`templates/shared` has the files of every kind; those of `PluginNames.templates` are added to them. A template is the
real file of a plugin called `newname`; only those words are replaced. Its name ends in `-tpl`, so that no tool takes it
for code of this package. Reads the metadata of installed distributions; imports none of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvf_dev.inspection.problems import name_fault
from kvframework import __version__
from kvframework.api.installing import SOURCES, requirement
from kvframework.errors import KVFrameworkError
from kvframework.registry.discovery import KINDS, discover

_SUFFIX = "-tpl"
# Kind and option of each variant of the plain plugin, and the folders of its templates: a later one's file stands in
# the place of an earlier one's.
VARIANTS = {
    ("tier", "helper"): ("tier", "tier-helper"),
    ("transport", "driver"): ("accelerator", "transport-driver"),
    ("transport", "async"): ("accelerator", "transport-async"),
}
# The plain plugins that have more than the folder of their kind.
_PLAIN = {"layout": ("torch", "layout")}


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
        return f"{self.kind}.{self.name}"

    @property
    def templates(self) -> tuple[str, ...]:
        """The folders of its own templates, beside the shared ones."""
        return VARIANTS[self.kind, self.variant] if self.variant else _PLAIN.get(self.kind, (self.kind,))

    @property
    def requires(self) -> tuple[str, ...]:
        """The distributions of this project that it imports."""
        return ("kvframework", "kvframework-devices") if self.variant == "driver" else ("kvframework",)

    @property
    def test_requirements(self) -> dict[str, tuple[str, ...]]:
        """The distributions that its tests need, with their extras: the kits, and torch where views are compared with
        its own."""
        torch = {"kvframework": ("torch",)} if self.kind == "layout" else {}
        return {"kvframework-dev": (), **torch}


def choose_names(kind: str, name: str, *variants: str) -> PluginNames:
    """The names of a new plugin. Raises `NameRefused`. Blocking: reads the metadata of what is installed."""
    if kind not in KINDS:
        raise NameRefused(f"unknown kind {kind!r}", where="KIND", available=", ".join(KINDS))
    if fault := name_fault(kind, name):
        hint = f"did you mean {fault.nearest}?" if fault.nearest else "choose one such as my_store"
        raise NameRefused(fault.fact, where="NAME", available=fault.available, hint=hint)
    for variant in variants:
        if (kind, variant) not in VARIANTS:
            fact, available = f"the kind {kind} has no --{variant}", [f"{each} --{option}" for each, option in VARIANTS]
            hint = f"leave --{variant} out"
            raise NameRefused(fact, where=f"--{variant}", available=", ".join(available), hint=hint)
    if len(variants) > 1:
        fact = f"--{variants[0]} and --{variants[1]} exclude each other"
        raise NameRefused(fact, where="KIND", available="one of them", hint="write a plugin for each")
    names = PluginNames(kind, name, *variants)
    for fact in _taken(names):
        raise NameRefused(fact, where="NAME", hint="choose another name: two plugins cannot share one name")
    return names


def _taken(names: PluginNames) -> Iterator[str]:
    for offer in discover():
        if (offer.kind, offer.name) == (names.kind, names.name):
            yield f"{offer.origin} already offers {names.title}"
    with contextlib.suppress(metadata.PackageNotFoundError):
        yield f"a distribution {names.distribution} is already installed, {metadata.version(names.distribution)}"
    if found := importlib.util.find_spec(names.module):
        yield f"a module {names.module} already exists at {found.origin}"


def render(names: PluginNames) -> dict[str, str]:
    """The text of each file by its path in the new folder, with `/` between its parts. Raises `NameRefused` for a name
    that would give a class of the plugin the name of one that it imports."""
    words = _words(names)
    files: dict[str, str] = {}
    templates = _templates("shared")
    own = {path: text for part in names.templates for path, text in _templates(part).items()}
    for path, text in own.items():
        templates[path] = templates.get(path, "") + text
    for path, text in templates.items():
        _check_classes(text, names)
        files[_replaced(path, words)] = _replaced(text, words)
    return files


def _templates(part: str) -> dict[str, str]:
    folder = Path(__file__).parent / "templates" / part
    files = sorted(folder.rglob(f"*{_SUFFIX}"))
    return {str(file.relative_to(folder)).removesuffix(_SUFFIX): file.read_text(encoding="utf-8") for file in files}


def _check_classes(template: str, names: PluginNames) -> None:
    """Refuse the name `key` for a hasher: its `KeyHasher` would be a subclass of itself."""
    found = set(re.findall(r"\w+", template))
    made = {word.replace("Newname", names.class_prefix) for word in found if word.startswith("Newname")}
    if clashes := made & found:
        fact = f"{names.name!r} cannot be the name of a {names.kind}: {min(clashes)} is a name of kvframework itself"
        raise NameRefused(fact, where="NAME", hint=f"did you mean my_{names.name}?")


def _words(names: PluginNames) -> dict[str, str]:
    wheels = " ".join(SOURCES[each] for each in ("kvframework", "kvframework-dev", *names.requires[1:]))
    return {
        "kvf-newname": names.distribution,
        "Newname": names.class_prefix,
        "newname": names.name,
        "NEWNAME": names.name.upper(),
        "newkind": names.kind,
        "CORE_REQUIREMENTS": ", ".join(f'"{each}>=PRESENT_MINOR"' for each in names.requires),
        # For pip 0.3.0.dev0 is lower than 0.3.
        "PRESENT_MINOR": ".".join(__version__.split(".")[:2]) + ".0.dev0",
        "KITS_REQUIREMENT": kits_requirement(names),
        "WHEEL_COMMAND": f"pip wheel --no-deps --wheel-dir wheels {wheels}",
        "REQUIRED_BESIDE": "".join(f" {requirement(distribution=each)}" for each in names.requires[1:]),
        "SUBDIRECTORIES": "".join(
            f' "$KVFRAMEWORK#subdirectory={SOURCES[each].partition("/")[2]}"' for each in names.requires[1:]
        ),
        "TEST_REQUIREMENTS": ", ".join(
            f'"{distribution}{f"[{extras[0]}]" if extras else ""}"'
            for distribution, extras in names.test_requirements.items()
        ),
    }


def kits_requirement(names: PluginNames) -> str:
    wanted = dict.fromkeys(names.requires[1:], ()) | names.test_requirements
    return " ".join(requirement(*extras, distribution=distribution) for distribution, extras in wanted.items())


def _replaced(text: str, words: dict[str, str]) -> str:
    for word, meant in words.items():
        text = text.replace(word, meant)
    return text


def write_distribution(folder: Path, files: Mapping[str, str]) -> None:
    """Create `folder` and write `files` into it. Blocking.

    Raises `FolderExists` if the path exists, an empty folder too, and `ScaffoldError` if it cannot be written; a
    partial folder is removed then.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        hint = "remove the folder, or give another --path"
        raise FolderExists(f"the folder {folder} already exists", where="--path", hint=hint) from error
    except OSError as error:
        raise _failed(folder, error) from error
    try:
        for path, text in files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise _failed(folder, error) from error


def _failed(folder: Path, error: OSError) -> ScaffoldError:
    return ScaffoldError(
        f"{folder} cannot be written: {error.strerror or error}",
        where="--path",
        hint="give a --path in a folder that you may write to",
    )
