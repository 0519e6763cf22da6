"""Small types that several kinds of plugins share: buffers, block ids, element types, and messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvframework.errors import BadDtype

__all__ = ["ArenaRange", "BlockIds", "Buffer", "GroupBlocks", "Message"]

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


class ArenaRange(Message, frozen=True, array_like=True):
    """One object's place in the arena, in bytes; `chunk` counts from the key's `start`."""

    chunk: int
    group: int
    offset: int
    length: int


class GroupBlocks(NamedTuple):
    """The blocks of one layer group of a transfer.

    `ids` are those that objects are made of, object by object, `per_object` to each: all blocks of a chunk, of a state
    only the last one. Every id but `NO_BLOCK` is a block of the engine, `highest` at most (-1: none is touched). The
    first `first` ids are `NO_BLOCK`: a store leaves these objects out, a load does not write these blocks.
    """

    ids: Sequence[int]
    per_object: int
    first: int
    highest: int

    @property
    def first_chunk(self) -> int:
        """The first chunk of which anything is touched."""
        return self.first // self.per_object
