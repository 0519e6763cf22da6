"""Small types that several kinds of plugins share: buffers, block ids, element types, and messages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvframework.errors import BadDtype

__all__ = ["DTYPE_BYTES", "BlockIds", "Buffer", "Message"]

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
    """Returns the bytes of one element of the dtype `name` (torch's names without the `torch.` prefix). Raises
    `BadDtype`."""
    try:
        return DTYPE_BYTES[name]
    except KeyError:
        raise BadDtype(
            f"there is no dtype {name!r}", available=", ".join(DTYPE_BYTES), hint="give torch's name without 'torch.'"
        ) from None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of every message on the wire: msgpack maps that evolve by adding defaulted fields, never by retyping."""
