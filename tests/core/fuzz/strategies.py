"""Hypothesis strategies made from the structs themselves: what they can hold, and what became of it."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from tests.core.fuzz.mutation import mutated, mutated_bytes

randoms = st.randoms(use_true_random=False)
_INT64, _UINT64 = -(1 << 63), (1 << 64) - 1


@functools.cache
def valid(struct: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Any value that the struct can hold."""
    return _of(inspect.type_info(struct))


@functools.cache
def mutations(struct: type[msgspec.Struct]) -> st.SearchStrategy[bytes]:
    return st.builds(mutated, randoms, valid(struct))


def mangled(packed: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.builds(mutated_bytes, randoms, packed)


def _of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.Metadata(type=inner):
            return _of(inner)
        case inspect.UnionType(types=types):
            return st.one_of([_of(each) for each in types])
        case inspect.NoneType():
            return st.none()
        case inspect.StructType(cls=struct, fields=fields):
            given = {field.name: _of(field.type) for field in fields if field.required}
            optional = {field.name: _of(field.type) for field in fields if not field.required}
            return st.fixed_dictionaries(given, optional=optional).map(lambda values: struct(**values))
        case inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
            return st.lists(_of(item), min_size=least or 0, max_size=min(most or 4, 4)).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*(_of(each) for each in items))
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=least, le=most):
            return st.integers(_INT64 if least is None else least, _UINT64 if most is None else most)
        case inspect.FloatType(ge=least, le=most):
            return st.floats(min_value=least, max_value=most)
        case inspect.StrType(min_length=least, max_length=most):
            return st.text(min_size=least or 0, max_size=min(most or 20, 20))
        case inspect.BytesType():
            return st.binary(max_size=40)
    raise TypeError(f"no strategy for {kind}")
