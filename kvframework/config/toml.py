"""Owns reading TOML: from a text or a file to a raw table, with errors that name file and line."""

from __future__ import annotations

import sys
from pathlib import Path

from kvframework.errors import ConfigFileError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str, *, where: str) -> dict[str, object]:
    """Raises `ConfigFileError` with line and column."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigFileError(f"not valid TOML: {error}", where=where, hint="strings need quotes in TOML") from None


def read_toml(path: Path) -> dict[str, object]:
    """Blocking. Raises `ConfigFileError` if the file is missing, unreadable, not UTF-8 or no TOML."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigFileError(
            f"cannot be read: {error.strerror or error}", where=str(path), hint="check --config and KVFRAMEWORK_CONFIG"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"not UTF-8: {error}", where=str(path), hint="TOML files are UTF-8") from None
    return parse_toml(text, where=str(path))
