"""The keys of a TOML table: from a raw table to a msgspec struct. An unknown key is an error with the place and the
closest known key, a value of another type one without the value: it may be a secret."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from kvframework.api.sizes import ByteSize
from kvframework.errors import ConfigFieldError

T = TypeVar("T", bound=msgspec.Struct)

_UNQUOTED = {
    "bool": "write true or false, without quotes",
    "int": "write the number without quotes",
    "float": "write the number without quotes",
}
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
    raise NotImplementedError(f"{kind.__name__} is no type for an option")


def _field_error(text: str, struct: type[msgspec.Struct], where: str) -> ConfigFieldError:
    match = _FIELD.match(text)
    # TOML has no null: an optional key is simply missing.
    fact = (match["fact"] if match else text).replace(" | null`", "`")
    field = match["field"] if match else ""
    return ConfigFieldError(
        fact[:1].lower() + fact[1:],
        where=f"{where} {field}" if field else where,
        available=_choices(struct, field) if match else ", ".join(sorted(struct.__struct_encode_fields__)),
        hint=next((hint for expected, hint in _UNQUOTED.items() if fact == f"Expected `{expected}`, got `str`"), ""),
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
