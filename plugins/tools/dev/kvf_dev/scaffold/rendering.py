"""Rendering of templates as the files of one plugin, and their writing into a new folder, all of it or nothing.

A template is the real file of a plugin called `newname`; only those words are replaced. For a file that both the shared
templates and a kind have, the kind's part follows the shared one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from kvf_dev.scaffold.names import FolderExists, NameRefused, PluginNames, ScaffoldError
from kvframework import __version__
from kvframework.api.installing import requirement, wheel_command

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


_SUFFIX = "-tpl"


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
    folder = resources.files(__package__) / "templates" / part
    return {path: template.read_text(encoding="utf-8") for path, template in _walk(folder)}


def _check_classes(template: str, names: PluginNames) -> None:
    """Refuse the name `key` for a hasher: its `KeyHasher` would be a subclass of itself."""
    found = set(re.findall(r"\w+", template))
    made = {word.replace("Newname", names.class_prefix) for word in found if word.startswith("Newname")}
    if clashes := made & found:
        raise NameRefused(
            f"{names.name!r} cannot be the name of a {names.kind}: {min(clashes)} is a name of kvframework itself",
            where="NAME",
            hint=f"did you mean my_{names.name}?",
        )


def _words(names: PluginNames) -> dict[str, str]:
    """The replacements, in the order in which they are applied."""
    return {
        "kvf-newname": names.distribution,
        "Newname": names.class_prefix,
        "newname": names.name,
        "NEWNAME": names.name.upper(),
        "newkind": names.kind,
        # For pip 0.3.0.dev0 is lower than 0.3.
        "PRESENT_MINOR": ".".join(__version__.split(".")[:2]) + ".0.dev0",
        "KITS_REQUIREMENT": kits_requirement(names),
        "WHEEL_COMMAND": wheel_command(),
        "TEST_REQUIREMENTS": ", ".join(
            f'"{distribution}{f"[{extras[0]}]" if extras else ""}"'
            for distribution, extras in names.test_requirements.items()
        ),
    }


def kits_requirement(names: PluginNames) -> str:
    """What pip is given for the tests of the new plugin."""
    return " ".join(
        requirement(*extras, distribution=distribution) for distribution, extras in names.test_requirements.items()
    )


def _replaced(text: str, words: dict[str, str]) -> str:
    for word, meant in words.items():
        text = text.replace(word, meant)
    return text


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """Path and file of every template below `folder`, in the order of their names."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(_SUFFIX):
            yield prefix + entry.name.removesuffix(_SUFFIX), entry


def write_distribution(folder: Path, files: Mapping[str, str]) -> None:
    """Creates `folder` and writes `files` into it. Blocking.

    Raises `FolderExists` if the path exists, an empty folder too, and `ScaffoldError` if it cannot be written; a
    partial folder is removed then.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _failed(folder, error) from error
    try:
        folder.mkdir()
    except FileExistsError:
        raise FolderExists(
            f"{folder} exists already", where="--path", hint="nothing is overwritten: remove it, or give another --path"
        ) from None
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
        hint="give --path a folder in which you may create folders",
    )
