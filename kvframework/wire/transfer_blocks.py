"""Which blocks a transfer touches, the check of their ids, and their form on the wire, for both sides. Pure.

An engine gives block ids for all tokens of a range in every layer group. Of a window only the last blocks hold useful
KV, of a state the last one of a chunk; engines have long freed the others."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Sequence

from kvframework.api.layout import NO_BLOCK, KVLayout, LayerGroup
from kvframework.api.plugin import BlockIds
from kvframework.api.transport import GroupBlocks
from kvframework.errors import BadBlockIds, InvalidPayload

# Numbers on the wire are packed little-endian, never a list of ints: u32, places in the arena u64. To pack raises
# `OverflowError` for a number that is none, to unpack `InvalidPayload` for an impossible length.

INDEX_BYTES = 4
OFFSET_BYTES = 8


def pack_indices(indices: Iterable[int]) -> bytes:
    return _little_endian(array.array("I", indices)).tobytes()


def unpack_indices(packed: bytes, *, where: str) -> list[int]:
    return _unpack("I", packed, INDEX_BYTES, where)


def pack_offsets(offsets: Iterable[int]) -> bytes:
    return _little_endian(array.array("Q", offsets)).tobytes()


def unpack_offsets(packed: bytes, *, where: str) -> list[int]:
    return _unpack("Q", packed, OFFSET_BYTES, where)


def _unpack(kind: str, packed: bytes, each: int, where: str) -> list[int]:
    if len(packed) % each:
        raise InvalidPayload(f"the field has {len(packed)} bytes", where=where, available=f"a multiple of {each} bytes")
    return _little_endian(array.array(kind, packed)).tolist()


def pack_block_ids(block_ids: BlockIds) -> tuple[bytes, ...]:
    """One frame per layer group. Raises `BadBlockIds` for an id that is no u32."""
    try:
        return tuple(pack_indices(ids) for ids in block_ids)
    except (OverflowError, TypeError) as error:
        raise BadBlockIds(f"a block id is not a u32: {error}", where="block_ids") from None


def _little_endian(numbers: array.array[int]) -> array.array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def checked_blocks(
    layout: KVLayout, chunk_tokens: int, tokens: int, block_ids: BlockIds, *, storing: bool, bounded: bool
) -> tuple[GroupBlocks, ...]:
    """The blocks that a store or load of `tokens` tokens (whole chunks) touches, per layer group. `bounded`: a layer
    group whose number of blocks is unknown has none; otherwise any id is accepted there. Raises `BadBlockIds` for
    another number of lists or ids than the tokens need, and for a touched id that is no block. Ids of untouched blocks
    are not checked. A store may name no touched block twice: it holds one part of a prompt."""
    if len(block_ids) != len(layout.groups):
        raise BadBlockIds(
            f"the call has {len(block_ids)} lists of block ids", available=f"{len(layout.groups)}, one per layer group"
        )
    result = []
    for index, (group, ids) in enumerate(zip(layout.groups, block_ids, strict=True)):
        expected, own = tokens // group.block_size, _as_ints(ids, index)
        if len(own) != expected:
            raise BadBlockIds(f"the call has {len(own)} block ids", where=_place(index), available=f"{expected}")
        touched = touched_blocks(group, chunk_tokens, own, storing=storing)
        if bounded or layout.blocks_of(index):
            check_bound(layout, index, touched.highest)
        held = touched.ids[touched.first :]
        if storing and len(set(held)) < len(held):
            raise BadBlockIds("a store names a block twice", where=_place(index), available="different blocks")
        result.append(touched)
    return tuple(result)


def check_bound(layout: KVLayout, group: int, highest: int) -> None:
    """Raise `BadBlockIds` unless the layer group has the block `highest` (-1: no block)."""
    blocks = layout.blocks_of(group)
    if highest >= blocks:
        fact = f"block id {highest}" + (" is NO_BLOCK, where the transfer needs a block" if highest == NO_BLOCK else "")
        raise BadBlockIds(fact, where=_place(group), available=f"0 to {blocks - 1}")


def touched_blocks(group: LayerGroup, chunk_tokens: int, ids: Sequence[int], *, storing: bool) -> GroupBlocks:
    """The blocks of one layer group that a store or load of whole chunks touches; `ids` are all block ids of its range.

    A load writes the blocks in the window at its end. A store of these leaves out the chunks up to the last `NO_BLOCK`.
    """
    per_object = chunk_tokens // group.block_size
    if group.state:
        ids, per_object = ids[per_object - 1 :: per_object], 1
    if not (group.window or group.state):
        return GroupBlocks(ids, per_object, 0, max(ids, default=-1))
    if storing:
        absent = max((index for index, each in enumerate(ids) if each == NO_BLOCK), default=-1)
        first = 0 if absent < 0 else (absent // per_object + 1) * per_object
    else:
        tokens = len(ids) * (chunk_tokens // per_object)
        first = len(ids) - 1 if group.state else group.first_loaded_block(tokens)
    used = ids[first:]
    return GroupBlocks([*[NO_BLOCK] * first, *used] if first else ids, per_object, first, max(used, default=-1))


def _as_ints(ids: Sequence[int], group: int) -> list[int]:
    """A copy as ints: the engine's list stays its own."""
    if isinstance(ids, (bytes, bytearray)):  # an array takes them for the memory of its numbers
        raise BadBlockIds("block ids are bytes", where=_place(group), available="a list of integers")
    try:
        return array.array("I", ids).tolist()
    except (TypeError, ValueError, OverflowError) as error:
        raise BadBlockIds(f"block ids are not unsigned 32-bit integers: {error}", where=_place(group)) from None


def _place(group: int) -> str:
    return f"layer group {group}"
