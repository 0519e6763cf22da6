"""Writing of a new plugin to the disk: into a new folder, all of it or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from kvf_dev.scaffold.errors import FolderExists, ScaffoldError


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
