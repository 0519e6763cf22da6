"""Messages to record: of each struct one with every field set, and one with the required ones only. Deterministic."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import cycle
from typing import TypeVar

import msgspec
from msgspec import inspect

from kvframework.api.plugin import Message

M = TypeVar("M", bound=Message)

# One for each way in which msgpack writes a number.
_NUMBERS = (7, 200, 40_000, 3_000_000_000, 1 << 40)


@functools.cache
def every_field(struct: type[M]) -> M:
    return msgspec.convert(_struct(struct, cycle(_NUMBERS), required_only=False), struct)


@functools.cache
def required_fields(struct: type[M]) -> M:
    return msgspec.convert(_struct(struct, cycle(_NUMBERS), required_only=True), struct)


def explicit(value: object) -> object:
    """As JSON, with every field, defaults too; bytes as 0x and hexadecimal digits."""
    if isinstance(value, msgspec.Struct):
        return {name: explicit(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, (tuple, list)):
        return [explicit(each) for each in value]
    return f"0x{value.hex()}" if isinstance(value, bytes) else value


def _struct(struct: type, numbers: Iterator[int], *, required_only: bool) -> object:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    fields = [field for field in info.fields if field.required or not required_only]
    values = {field.name: _value(field.type, field.name, numbers, required_only=required_only) for field in fields}
    return list(values.values()) if info.array_like else values


def _value(kind: inspect.Type, name: str, numbers: Iterator[int], *, required_only: bool) -> object:
    match kind:
        case inspect.Metadata(type=inner):
            return _value(inner, name, numbers, required_only=required_only)
        case inspect.UnionType(types=types):
            return _value(types[0], name, numbers, required_only=required_only)
        case inspect.StructType(cls=struct):
            return _struct(struct, numbers, required_only=required_only)
        case inspect.VarTupleType(item_type=item, min_length=fewest):
            items = fewest or 0 if required_only else 2
            return [_value(item, f"{name}{at}", numbers, required_only=required_only) for at in range(items)]
        case inspect.BoolType():
            return True
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.IntType(le=int(most)) if most <= 100:
            return most - 1
        case inspect.IntType():
            return next(numbers)
        case inspect.FloatType(le=None):
            return next(numbers) + 0.5
        case inspect.FloatType(le=most):
            return most / 2
        case inspect.StrType():
            return f"{name} ü"
        case inspect.BytesType():
            return name.encode() + b"\x00\xff"
    raise TypeError(f"no sample of {kind}")
