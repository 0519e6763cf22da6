"""Owns the rule which blocks of a transfer are touched, for both halves of every transport. Pure.

An engine gives block ids for all tokens of a range in every layer group. Of a window only its last blocks hold anything
that counts, of a state the last one of a chunk; engines have long given the others away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvframework.api.layout import NO_BLOCK, LayerGroup


class TouchedBlocks(NamedTuple):
    """`ids` are those that objects are made of, `per_chunk` to an object; the first `first` of them are not touched,
    whatever they say. A store leaves out `first // per_chunk` whole chunks."""

    ids: Sequence[int]
    per_chunk: int
    first: int


def touched_blocks(group: LayerGroup, chunk_tokens: int, ids: Sequence[int], *, storing: bool) -> TouchedBlocks:
    """What a store or load of whole chunks touches of one layer group; `ids` are all block ids of its range.

    A load writes what lies in the window at its end. A store of a window or state leaves out the chunks up to the last
    one that has a `NO_BLOCK`. Nothing else is checked: the caller knows how many blocks there are.
    """
    per_chunk = chunk_tokens // group.block_size
    if group.state:
        ids, per_chunk = ids[per_chunk - 1 :: per_chunk], 1
    if not (group.window or group.state):
        return TouchedBlocks(ids, per_chunk, 0)
    if storing:
        absent = max((index for index, each in enumerate(ids) if each == NO_BLOCK), default=-1)
        return TouchedBlocks(ids, per_chunk, 0 if absent < 0 else (absent // per_chunk + 1) * per_chunk)
    tokens = len(ids) * (chunk_tokens // per_chunk)
    return TouchedBlocks(ids, per_chunk, len(ids) - 1 if group.state else group.first_loaded_block(tokens))
