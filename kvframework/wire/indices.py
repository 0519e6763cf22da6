"""Owns how lists of small numbers travel: packed little-endian u32, never a list of ints. Pure."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable

from kvframework.errors import InvalidPayload

INDEX_BYTES = 4


def pack_indices(indices: Iterable[int]) -> bytes:
    """Raises `OverflowError` for a number that is no u32."""
    return _little_endian(array.array("I", indices)).tobytes()


def unpack_indices(packed: bytes, *, where: str) -> list[int]:
    """The inverse of `pack_indices`. Raises `InvalidPayload` for a length that cannot be."""
    if len(packed) % INDEX_BYTES:
        raise InvalidPayload(f"{len(packed)} bytes", where=where, available="packed u32, 4 bytes each")
    return _little_endian(array.array("I", packed)).tolist()


def _little_endian(numbers: array.array[int]) -> array.array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
