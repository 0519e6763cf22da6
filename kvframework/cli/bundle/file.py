"""The file of `kvframework dump` and of the report of a GPU: a tar archive that only its user may read."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

from kvframework.errors import ConfigFileError

FOLDER = "kvframework-dump"


def default_name() -> str:
    return f"{FOLDER}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"


class BundleFile:
    """A new, empty file at `place`, whose texts will lie in `folder`. Raises `ConfigFileError` if it exists or cannot
    be written."""

    def __init__(self, place: Path, folder: str = FOLDER) -> None:
        self.place = place
        self._folder = folder
        try:
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _refusal(place, error) from None
        self._file = os.fdopen(descriptor, "wb")

    def __enter__(self) -> BundleFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is not None:
            self.place.unlink(missing_ok=True)

    def write(self, files: Mapping[str, str]) -> None:
        """Write texts by name, once. Raises `ConfigFileError`."""
        try:
            # Closed here in any case: what a full disk has not taken would fail once more at the end.
            with self._file:
                self._file.write(_packed(self._folder, files))
        except OSError as error:
            raise _refusal(self.place, error) from None


def _packed(folder: str, files: Mapping[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            data = text.encode("utf-8", "backslashreplace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _refusal(place: Path, error: OSError) -> ConfigFileError:
    return ConfigFileError(f"cannot be written: {error.strerror or error}", where=str(place), hint="name a new file")
