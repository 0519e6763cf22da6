"""Descriptions of a plugin's options without an instance: names, types, defaults and documentation. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

from kvframework.api.options import ByteSize
from kvframework.masking import secret_mark

_BASIC: dict[type[inspect.Type], str] = {
    inspect.AnyType: "anything",
    inspect.BoolType: "boolean",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "string",
    inspect.DateTimeType: "date and time",
    inspect.DateType: "date",
    inspect.TimeType: "time",
    inspect.StructType: "table",
    inspect.TypedDictType: "table",
}
_ARRAYS = (
    inspect.ListType,
    inspect.SetType,
    inspect.FrozenSetType,
    inspect.VarTupleType,
    inspect.CollectionType,
)


class OptionInfo(msgspec.Struct, frozen=True):
    """One field of a plugin's options. `default` means nothing while `required`."""

    name: str
    type: str
    required: bool
    default: object
    description: str
    secret: bool


def describe_options(options: type[msgspec.Struct]) -> list[OptionInfo]:
    """The fields of a struct of options or of the configuration, in their order."""
    struct = inspect.type_info(options)
    assert isinstance(struct, inspect.StructType)
    return [_describe(field) for field in struct.fields]


def _describe(field: inspect.Field) -> OptionInfo:
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    metadata = field.type if isinstance(field.type, inspect.Metadata) else inspect.Metadata(field.type)
    return OptionInfo(
        name=field.encode_name,
        type=type_text(field.type),
        required=field.required,
        default=None if field.required else default,
        description=(metadata.extra_json_schema or {}).get("description", ""),
        secret=secret_mark(field.type) is not None,
    )


def type_text(kind: Any) -> str:
    """A type as readers of a TOML file know it, with its bounds."""
    if isinstance(kind, inspect.Metadata):
        return type_text(kind.type)
    if isinstance(kind, inspect.CustomType):
        return "size" if kind.cls is ByteSize else kind.cls.__name__
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in kind.values)
    if isinstance(kind, inspect.EnumType):
        return " or ".join(f'"{member.value}"' for member in kind.cls)
    if isinstance(kind, inspect.UnionType):
        return " or ".join(type_text(each) for each in kind.types if not isinstance(each, inspect.NoneType))
    if isinstance(kind, _ARRAYS):
        return f"array of {type_text(kind.item_type)}"
    if isinstance(kind, inspect.TupleType):
        return f"array of {', '.join(type_text(each) for each in kind.item_types)}"
    if isinstance(kind, inspect.DictType):
        return f"table of {type_text(kind.value_type)}"
    return _BASIC.get(type(kind), type(kind).__name__.removesuffix("Type").lower()) + _bounds(kind)


def _bounds(kind: Any) -> str:
    if not isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return ""
    if kind.ge is not None and kind.le is not None:
        return f" {kind.ge} to {kind.le}"
    bounds = ((">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt))
    limits = [f"{sign} {bound}" for sign, bound in bounds if bound is not None]
    return f" {' and '.join(limits)}" if limits else ""
