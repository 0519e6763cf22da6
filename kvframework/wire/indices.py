"""Block ids, places in the arena and other numbers on the wire: packed little-endian, never a list of ints. Pure."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable

from kvframework.api.types import BlockIds
from kvframework.errors import BadBlockIds, InvalidPayload

INDEX_BYTES = 4
OFFSET_BYTES = 8


def pack_indices(indices: Iterable[int]) -> bytes:
    """Packs the numbers. Raises `OverflowError` for a number that is no u32."""
    return _little_endian(array.array("I", indices)).tobytes()


def unpack_indices(packed: bytes, *, where: str) -> list[int]:
    """The inverse of `pack_indices`. Raises `InvalidPayload` for an impossible length."""
    if len(packed) % INDEX_BYTES:
        raise InvalidPayload(f"{len(packed)} bytes", where=where, available="packed u32, 4 bytes each")
    return _little_endian(array.array("I", packed)).tolist()


def pack_offsets(offsets: Iterable[int]) -> bytes:
    """Packs places in the arena as u64. Raises `OverflowError` for a number that is none."""
    return _little_endian(array.array("Q", offsets)).tobytes()


def unpack_offsets(packed: bytes, *, where: str) -> list[int]:
    """The inverse of `pack_offsets`. Raises `InvalidPayload` for an impossible length."""
    if len(packed) % OFFSET_BYTES:
        raise InvalidPayload(f"{len(packed)} bytes", where=where, available="packed u64, 8 bytes each")
    return _little_endian(array.array("Q", packed)).tolist()


def pack_block_ids(block_ids: BlockIds) -> tuple[bytes, ...]:
    """One frame per layer group. Raises `BadBlockIds` for an id that is no u32."""
    try:
        return tuple(pack_indices(ids) for ids in block_ids)
    except (OverflowError, TypeError) as error:
        raise BadBlockIds(f"a block id is no u32: {error}", where="block_ids") from None


def _little_endian(numbers: array.array[int]) -> array.array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
