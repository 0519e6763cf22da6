"""The file of `kvframework dump`: a tar archive that only its user may read."""

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


def write(place: Path, files: Mapping[str, str]) -> Path:
    """Write `files`, texts by name. Raises `ConfigFileError` if `place` exists or cannot be written."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            data = text.encode("utf-8", "backslashreplace")
            entry = tarfile.TarInfo(f"{FOLDER}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    try:
        with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(packed.getvalue())
    except OSError as error:
        raise ConfigFileError(
            f"cannot be written: {error.strerror or error}", where=str(place), hint="name a new file with --out"
        ) from None
    return place
