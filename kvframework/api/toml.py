"""TOML: from a text or file to a raw table, with errors that name file and line, and from a value to its text."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvframework.api.options import ByteSize
from kvframework.api.toml_mistakes import deep_at, excerpt, explain
from kvframework.errors import ConfigFieldError, ConfigFileError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["read_toml"]

# The largest file that is read: no configuration has this many bytes, a device has no end, and the parser takes 2 us
# for a byte.
MOST_BYTES = 256 << 10
# The deepest table or array that is read: no option is as deep, Python's stack has an end, and the parser takes the
# square of a key's parts.
MOST_LEVELS = 32


def parse_toml(text: str, *, where: str) -> dict[str, object]:
    """Parses a TOML text. Raises `ConfigFileError`, and `ConfigFieldError` for what is nested too deep, with the line,
    its text, a caret at the mistake and a hint."""
    text = text.replace("\r\n", "\n")
    deep = deep_at(text, MOST_LEVELS)
    if deep is not None:
        line = text.count("\n", 0, deep) + 1
        raise ConfigFieldError(
            f"this is nested more than {MOST_LEVELS} levels deep\n{_indented(excerpt(text, deep, line))}",
            where=f"{where}: line {line}",
            hint="a name with a dot in it needs quotes, and each [ and { its end",
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        mistake = explain(text, str(error))
        fact = f"not valid TOML, line {mistake.line}: {mistake.fact}\n{_indented(mistake.excerpt)}"
        raise ConfigFileError(fact, where=where, hint=mistake.hint) from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigFileError(f"not valid TOML: {error}", where=where) from None


def read_toml(path: Path, named_by: str = "--config and KVFRAMEWORK_CONFIG") -> dict[str, object]:
    """Reads a TOML file. Blocking. Raises like `parse_toml`, and `ConfigFileError` if the file is missing, unreadable,
    too large or not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigFileError(
                f"it has more than {MOST_BYTES >> 10} KiB", where=str(path), hint="name the configuration's TOML file"
            )
        text = content.decode()
    except OSError as error:
        raise ConfigFileError(
            f"cannot be read: {error.strerror or error}", where=str(path), hint=f"check {named_by}"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"not UTF-8: {error}", where=str(path), hint="TOML files are UTF-8") from None
    return parse_toml(text, where=str(path))


def toml_value(value: object) -> str:
    """A value as TOML, on one line; a size with the largest unit that is exact. Raises `TypeError` for None and other
    values that TOML cannot express."""
    if isinstance(value, enum.Enum):
        return toml_value(value.value)
    if isinstance(value, ByteSize):
        return _size(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in text)
    if isinstance(value, Mapping):
        pairs = (f"{toml_value(str(key))} = {toml_value(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return f"[{', '.join(map(toml_value, value))}]"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _indented(lines: str) -> str:
    return "\n".join(f"    {line}" for line in lines.splitlines())


def _size(size: int) -> str:
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size and size % (1 << power) == 0:
            return f'"{size >> power}{unit}"'
    return str(int(size))
