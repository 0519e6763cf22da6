"""The values of a struct as they may be shown: secrets are hidden, and the credentials in URLs. Pure.

A field is secret by its type: `msgspec.Meta(extra={"secret": "value"})`, or `"url"` for one whose place may be shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import unquote

import msgspec

HIDDEN = "***"
# A value in a URL's query that is no number or flag.
_LONG = 6


def shown_options(options: msgspec.Struct) -> dict[str, object]:
    """Return the fields of a struct by name, as they may be shown: secrets are hidden, and the credentials in every
    URL."""
    struct = msgspec.inspect.type_info(type(options))
    assert isinstance(struct, msgspec.inspect.StructType)
    secrets = {field.name: secret_mark(field.type) for field in struct.fields}
    return {name: _shown(getattr(options, name), secrets[name]) for name in options.__struct_fields__}


def secret_mark(kind: msgspec.inspect.Type) -> str | None:
    """Return the secret part of a field of this type: "value" for all of it, "url" for its credentials, or None. Looks
    through unions and containers: an optional secret, or one of many, counts as one."""
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


def secrets_of(options: msgspec.Struct) -> set[str]:
    """Return the texts that `shown_options` hides: secret values, and the credentials of URLs."""
    struct = msgspec.inspect.type_info(type(options))
    assert isinstance(struct, msgspec.inspect.StructType)
    marks = {field.name: secret_mark(field.type) for field in struct.fields}
    return {text for name in options.__struct_fields__ for text in _hidden(getattr(options, name), marks[name])}


def _hidden(value: object, mark: str | None) -> Iterator[str]:
    if isinstance(value, msgspec.Struct):
        yield from secrets_of(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _hidden(key, mark)
            yield from _hidden(each, mark)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _hidden(each, mark)
    elif isinstance(value, str) and "://" in value:
        user, _, place = value.partition("://")[2].rpartition("@")
        yield from filter(None, (user, unquote(user), unquote(user.rpartition(":")[2])))
        values = (each.partition("=")[2] for each in place.partition("?")[2].split("&"))
        yield from (unquote(each) for each in values if len(each) >= _LONG)
    elif isinstance(value, str) and mark == "value" and value:
        yield value


def shown(value: object) -> object:
    """Return a value of the configuration that is no option of a plugin: the credentials of URLs are hidden."""
    return _shown(value)


def masked_url(url: str) -> str:
    """Return `url` without user name, password and query, even if it is malformed."""
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
