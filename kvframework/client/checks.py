"""The check of one transfer's arguments against its registration, for what must be known of many before the first
begins. Pure."""

from __future__ import annotations

from kvframework.api import BlockIds, Registration, touched_blocks
from kvframework.errors import BadBlockIds, BadRange


def check_transfer(registration: Registration, start: int, end: int, block_ids: BlockIds, *, storing: bool) -> None:
    """Raises `BadRange` if tokens `[start, end)` are no whole chunks, `BadBlockIds` if `block_ids` (a list per layer
    group) do not fit them or name a block that is not there. Blocks that the transfer does not touch may be any."""
    layout, chunk = registration.layout, registration.desc.chunk_tokens
    if not 0 <= start < end or start % chunk or end % chunk:
        raise BadRange(f"tokens {start} to {end}", available=f"whole chunks of {chunk} tokens")
    if len(block_ids) != len(layout.groups):
        raise BadBlockIds(
            f"{len(block_ids)} lists of block ids", available=f"{len(layout.groups)}, one per layer group"
        )
    for index, (group, ids) in enumerate(zip(layout.groups, block_ids, strict=True)):
        where, expected = f"layer group {index}", (end - start) // group.block_size
        if len(ids) != expected:
            raise BadBlockIds(f"{len(ids)} block ids", where=where, available=f"{expected} for these tokens")
        touched = touched_blocks(group, chunk, ids, storing=storing)
        used = touched.ids[touched.first :]
        try:
            low, high = (min(used), max(used)) if len(used) else (0, 0)
        except TypeError as error:
            raise BadBlockIds(f"block ids are no integers: {error}", where=where) from None
        blocks = layout.blocks_of(index)
        if low < 0 or (blocks and high >= blocks):
            raise BadBlockIds(
                f"block id {low if low < 0 else high}",
                where=where,
                available=f"0 to {blocks - 1}" if blocks else "0 or more",
            )
