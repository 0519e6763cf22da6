"""Owns how block ids travel: packed little-endian u32, one frame of bytes per layer group."""

from __future__ import annotations

import array
import sys

from kvframework.api import BlockIds
from kvframework.errors import BadBlockIds


def pack_block_ids(block_ids: BlockIds) -> tuple[bytes, ...]:
    """Raises `BadBlockIds` for an id that is no u32."""
    try:
        frames = [array.array("I", ids) for ids in block_ids]
    except (OverflowError, TypeError) as error:
        raise BadBlockIds(f"a block id is no u32: {error}", where="block_ids") from None
    if sys.byteorder == "big":
        for frame in frames:
            frame.byteswap()
    return tuple(frame.tobytes() for frame in frames)
