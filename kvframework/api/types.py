"""Owns the small value types that hooks, configuration and wire share: sizes, element types, buffers, and options with
what of them is secret."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from kvframework.errors import BadDtype

Buffer = bytes | bytearray | memoryview

# One list of block ids per layer group, in the order of the layout's groups.
BlockIds = Sequence[Sequence[int]]

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


def dtype_bytes(name: str) -> int:
    """Bytes of one element of the dtype `name` (torch's names without the `torch.` prefix). Raises `BadDtype`."""
    try:
        return DTYPE_BYTES[name]
    except KeyError:
        raise BadDtype(
            f"there is no dtype {name!r}", available=", ".join(DTYPE_BYTES), hint="give torch's name without 'torch.'"
        ) from None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of everything that travels: msgpack maps that evolve by adding defaulted fields, never by retyping."""


# The types of options that nobody but the plugin may see. `Annotated[SecretUrl, msgspec.Meta(description=...)]` adds to
# them. A `Secret` is shown as "***"; of a `SecretUrl` the place is shown, without user, password and query.
Secret = Annotated[str, msgspec.Meta(extra={"secret": "value"})]
SecretUrl = Annotated[str, msgspec.Meta(extra={"secret": "url"})]

HIDDEN = "***"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a plugin's own options: what its TOML table may hold besides the core's keys.

    A field's `msgspec.Meta(description=...)` is its documentation in `kvframework plugins info`. The repr hides what
    `Secret` and `SecretUrl` mark, and so does everything that the framework prints.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return list(shown_options(self).items())


class NoOptions(Options, frozen=True):
    """A plugin without options."""


class ByteSize(int):
    """A number of bytes; in TOML an integer or a string such as "512MiB", "1.5 GiB" or "10GB"."""

    _UNITS = {"": 1, "b": 1} | {
        f"{p}{u}": b**e for e, p in enumerate("kmgt", start=1) for u, b in (("", 1024), ("ib", 1024), ("b", 1000))
    }

    @classmethod
    def parse(cls, value: object) -> ByteSize:
        """Raises `ValueError` with what was expected."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(value)
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([a-zA-Z]*)\s*", value)
            if match and match[2].lower() in cls._UNITS:
                return cls(int(float(match[1]) * cls._UNITS[match[2].lower()]))
        raise ValueError(f'expected a size such as 1073741824, "512MiB" or "1GB", found {value!r}')

    def __str__(self) -> str:
        size = float(self)
        for unit in ("B", "KiB", "MiB", "GiB"):
            if size < 1024:
                return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
            size /= 1024
        return f"{size:.1f} TiB"


def shown_options(options: msgspec.Struct) -> dict[str, object]:
    """The options by name, as anybody may see them: secrets are hidden, and the credentials in every URL. Pure."""
    struct = msgspec.inspect.type_info(type(options))
    assert isinstance(struct, msgspec.inspect.StructType)
    secrets = {field.name: secret_mark(field.type) for field in struct.fields}
    return {name: _shown(getattr(options, name), secrets[name]) for name in options.__struct_fields__}


def secret_mark(kind: msgspec.inspect.Type) -> str | None:
    """What of a field of this type is secret: all of its "value", the credentials in its "url", or nothing. Looks
    through unions and containers: a secret that may be missing, or one of many, is one."""
    if isinstance(kind, msgspec.inspect.Metadata):
        own: str | None = (kind.extra or {}).get("secret")
        return own or secret_mark(kind.type)
    inside: list[msgspec.inspect.Type] = []
    if isinstance(kind, msgspec.inspect.UnionType):
        inside += kind.types
    elif isinstance(kind, msgspec.inspect.TupleType):
        inside += kind.item_types
    elif isinstance(kind, msgspec.inspect.DictType):
        inside += (kind.key_type, kind.value_type)
    elif isinstance(kind, msgspec.inspect.CollectionType):
        inside.append(kind.item_type)
    marks = {secret_mark(each) for each in inside} - {None}
    return "value" if "value" in marks else marks.pop() if marks else None


def masked_url(url: str) -> str:
    """`url` without user name, password and query, whatever is wrong with it."""
    scheme, separator, rest = url.partition("://")
    if not separator or "password" in rest.lower():
        return HIDDEN
    _, at, place = rest.rpartition("@")
    return f"{scheme}://{f'{HIDDEN}@' if at else ''}{place.partition('?')[0]}"


def _shown(value: object, mark: object = None) -> object:
    if isinstance(value, Mapping):
        return {key: _shown(each, mark) for key, each in value.items()}
    if isinstance(value, msgspec.Struct):
        return shown_options(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_shown(each, mark) for each in value]
    if not isinstance(value, str):
        return HIDDEN if mark and value is not None else value
    # A plugin may have forgotten to mark a URL.
    if mark == "url" or (not mark and "://" in value and "@" in value):
        return masked_url(value) if value else ""
    return HIDDEN if mark and value else value
