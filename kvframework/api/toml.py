"""TOML: from a text or file to a raw table, from that to a msgspec struct, and from a value to its text. Errors name
the place and the mistake, such as an unknown key with the closest known one, and no value: it may be a secret."""

from __future__ import annotations

import difflib
import enum
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from kvframework.api.plugin import ByteSize
from kvframework.errors import ConfigFieldError, ConfigFileError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["convert", "read_toml"]

# The largest file that is read: no configuration is as large, a device has no end, and the parser takes 2 us a byte.
MOST_BYTES = 256 << 10
# The deepest table or array that is read: no option is as deep, and Python's stack has an end.
MOST_LEVELS = 32
# The parser takes the square of a key's parts, and a key is in one line.
_MOST_DOTS = 256
MOST_SHOWN = 72
_HINT = "put text in plain quotes, close every quote, [ and {, and name each key and table once"


def parse_toml(text: str, *, where: str) -> dict[str, object]:
    """Parse a TOML text. Raises `ConfigFileError` with line and column, `ConfigFieldError` for too deep a nesting."""
    text = text.replace("\r\n", "\n")
    if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
        raise _too_deep(text, where)
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fact, _, place = str(error).removesuffix(")").rpartition(" (at ")
        fact = f"not valid TOML, {place}: {fact[:1].lower()}{fact[1:MOST_SHOWN]}"
        raise ConfigFileError(fact, where=where, hint=_HINT) from None
    except RecursionError:
        raise _too_deep(text, where) from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigFileError(f"not valid TOML: {error}", where=where) from None
    if any(_deeper(value, MOST_LEVELS) for value in parsed.values()):
        raise _too_deep(text, where)
    return parsed


def _too_deep(text: str, where: str) -> ConfigFieldError:
    signs = [sum(map(line.count, ".[{")) for line in text.splitlines()]
    fact = f"tables are nested more than {MOST_LEVELS} levels deep"
    hint = "put names with dots in quotes, and close every [ and {"
    return ConfigFieldError(fact, where=f"{where}: line {signs.index(max(signs)) + 1}", hint=hint)


def _deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (levels == 0 or any(_deeper(each, levels - 1) for each in inner))


def read_toml(path: Path, named_by: str = "--config and KVFRAMEWORK_CONFIG") -> dict[str, object]:
    """Read a TOML file. Blocking. Raises as `parse_toml` does, also for what is unreadable, too large or not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigFileError(
                f"the file has more than {MOST_BYTES >> 10} KiB", where=str(path), hint="give the TOML file"
            )
        text = content.decode()
    except OSError as error:
        raise ConfigFileError(
            f"the file cannot be read: {error.strerror or error}", where=str(path), hint=f"check {named_by}"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"the file is not UTF-8: {error}", where=str(path), hint="write UTF-8") from None
    return parse_toml(text, where=str(path))


def toml_value(value: object) -> str:
    """A value as TOML, on one line; a size with the largest exact unit. Raises `TypeError` for None and the like."""
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


def _size(size: int) -> str:
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size and size % (1 << power) == 0:
            return f'"{size >> power}{unit}"'
    return str(int(size))


T = TypeVar("T", bound=msgspec.Struct)

# In place of Python's names in msgspec's messages. TOML has no null: an optional key is simply missing.
_WORDS = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "a string"}
_WORDS |= {"array": "a list", "object": "a table", "null": ""}
_TYPES = re.compile(rf"`((?:{'|'.join(_WORDS)})(?: \| (?:{'|'.join(_WORDS)}))*)`")
_UNQUOTED = {"bool": "write true or false, without quotes"} | dict.fromkeys(
    ("int", "float"), "write the number without quotes"
)
_FIELD = re.compile(r"^(?P<fact>.*) - at `\$\.?(?P<field>[^`]*)`$", re.DOTALL)


def convert(raw: Mapping[str, object], struct: type[T], *, where: str, core_keys: Sequence[str] = ()) -> T:
    """`raw` as a `struct`, without coercing types; `ByteSize` fields also take strings such as "512MiB".

    `core_keys` are further keys that the same table may hold, named when a key is unknown. Raises `ConfigFieldError`
    with the place, the accepted values and the closest match.
    """
    fields = struct.__struct_encode_fields__
    for key in raw:
        if key not in fields:
            raise unknown_key(key, (*fields, *core_keys), where=where)
    try:
        return msgspec.convert(raw, struct, dec_hook=_decode)
    except (msgspec.ValidationError, OverflowError) as error:
        raise _field_error(str(error), struct, where) from None


def unknown_key(key: str, available: Iterable[str], *, where: str) -> ConfigFieldError:
    """The error for an unknown key, with a hint to the closest known one."""
    known = sorted(available)
    return ConfigFieldError(
        f"unknown key {key!r}", where=where, available=", ".join(known) or "no keys", hint=closest(key, known)
    )


def closest(word: str, known: Iterable[str]) -> str:
    """A hint to the closest known word, "" if none is similar."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {matches[0]!r}?" if matches else ""


def _decode(kind: type, value: object) -> object:
    if kind is ByteSize:
        return ByteSize.parse(value)
    raise NotImplementedError(f"{kind.__name__} is not a supported type for an option")


def _field_error(text: str, struct: type[msgspec.Struct], where: str) -> ConfigFieldError:
    match = _FIELD.match(text)
    fact = (match["fact"] if match else text).replace("Object missing required field", "missing key")
    unquoted = re.match(r"Expected `(\w+)(?: \| null)?`, got `str`", fact)
    fact = _TYPES.sub(lambda of: " or ".join(filter(None, map(_WORDS.get, of[1].split(" | ")))), fact)
    field = match["field"] if match else ""
    return ConfigFieldError(
        (fact[:1].lower() + fact[1:]).replace(", got ", ", found "),
        where=f"{where} {field}" if field else where,
        available=_choices(struct, field) if match else ", ".join(sorted(struct.__struct_encode_fields__)),
        hint=_UNQUOTED.get(unquoted[1], "") if unquoted else "",
    )


def _choices(struct: type[msgspec.Struct], name: str) -> str:
    """The values of a field that takes only certain ones, else ""."""
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        kind = field.type.type if isinstance(field.type, msgspec.inspect.Metadata) else field.type
        if field.encode_name == name and isinstance(kind, msgspec.inspect.LiteralType):
            return ", ".join(map(str, kind.values))
    return ""
