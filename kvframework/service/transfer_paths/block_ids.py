"""The block ids that a server-driven transfer names, unpacked and checked. Pure; runs on the serving thread."""

from __future__ import annotations

from collections.abc import Sequence

from kvframework.api.layout import KVLayout
from kvframework.api.transport import GroupBlocks
from kvframework.errors import BadBlockIds
from kvframework.wire.transfer_blocks import INDEX_BYTES, check_bound, checked_blocks, unpack_indices


def blocks_of_transfer(
    layout: KVLayout, chunk_tokens: int, packed: Sequence[bytes], chunks: int, *, storing: bool
) -> tuple[GroupBlocks, ...]:
    """Return the blocks that a transfer of `chunks` chunks touches, per layer group.

    `packed` holds little-endian u32, one frame of bytes per layer group. Raises `BadBlockIds` for a wrong number of
    groups or ids, or a touched id out of range.
    """
    ids = _unpack(packed, [chunk_tokens // group.block_size * chunks for group in layout.groups])
    return checked_blocks(layout, chunk_tokens, chunks * chunk_tokens, ids, storing=storing, bounded=True)


def one_block_each(layout: KVLayout, packed: Sequence[bytes]) -> list[int]:
    """Return one block id per layer group. Raises `BadBlockIds`."""
    ids = _unpack(packed, [1] * len(layout.groups))
    blocks = [each[0] for each in ids]
    for index, block in enumerate(blocks):
        check_bound(layout, index, block)
    return blocks


def _unpack(packed: Sequence[bytes], expected: Sequence[int]) -> list[list[int]]:
    if len(packed) != len(expected):
        raise BadBlockIds(f"block ids of {len(packed)} layer groups", available=f"{len(expected)} as registered")
    result = []
    for group, (frame, count) in enumerate(zip(packed, expected, strict=True)):
        if len(frame) != count * INDEX_BYTES:
            raise BadBlockIds(
                f"{len(frame)} bytes", where=f"block_ids[{group}]", available=f"{count} packed u32 for the key's tokens"
            )
        result.append(unpack_indices(frame, where=f"block_ids[{group}]"))
    return result
