"""Owns the check of one transfer's arguments against registration and tensors, and of the ranges that the server names.

Engine side, no server calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from kvf_cpu_gather.copying import BlockSelection, object_view
from kvframework.api import (
    ArenaRange,
    BlockIds,
    CacheKey,
    LayerGroup,
    LayerTensors,
    Layout,
    Registration,
    touched_blocks,
)
from kvframework.errors import BadBlockIds, BadRange

if TYPE_CHECKING:
    from kvf_cpu_gather.copying import GroupViews


class Transfer:
    """The checked arguments of one submit: views of the engine's memory and the blocks of each chunk.

    `first_chunks` is, per layer group, how many chunks a store leaves out, see `touched_blocks`. Borrows the engine's
    tensors. Raises `BadRange`, `BadBlockIds` or `BadLayout`.
    """

    def __init__(
        self,
        registration: Registration,
        layout: Layout,
        key: CacheKey,
        kv_caches: Mapping[str, LayerTensors],
        block_ids: BlockIds,
        blocks_in_chunk: Sequence[int],
        *,
        storing: bool,
    ) -> None:
        self.desc = registration.desc
        self.chunks, rest = divmod(key.end - key.start, self.desc.chunk_tokens)
        if rest or self.chunks < 1 or key.start < 0 or key.start % self.desc.chunk_tokens:
            raise BadRange(
                f"tokens {key.start} to {key.end}", available=f"whole chunks of {self.desc.chunk_tokens} tokens"
            )
        expected = [self.desc.chunk_tokens // group.block_size for group in registration.layout.groups]
        if list(blocks_in_chunk) != expected:
            raise BadBlockIds(f"blocks_in_chunk is {list(blocks_in_chunk)}", available=f"{expected}")
        if len(block_ids) != len(expected):
            raise BadBlockIds(f"{len(block_ids)} lists of block ids", available=f"{len(expected)}, one per layer group")
        self.layout = registration.layout
        self._groups = registration.layout.groups
        self.views: list[GroupViews] = list(layout.block_views(registration.layout, kv_caches))
        self._selections: list[BlockSelection] = []
        self._first_blocks: list[int] = []
        self.first_chunks: list[int] = []
        for index, (ids, group) in enumerate(zip(block_ids, self._groups, strict=True)):
            whole = _as_tensor(ids, index, expected[index] * self.chunks)
            used, per_chunk, first = _touched(group, self.desc.chunk_tokens, whole, storing)
            _check_range(used[first:], index, self.views[index][0][0].shape[0])
            self._selections.append(BlockSelection(used, per_chunk))
            self._first_blocks.append(first)
            self.first_chunks.append(first // per_chunk)

    def gather(self, place: ArenaRange, target: torch.Tensor) -> None:
        """Fills `target`, the object view of `place`. Raises `ValueError` for a chunk that the engine does not hold."""
        if place.chunk < self.first_chunks[place.group]:
            raise ValueError(f"the server asks for chunk {place.chunk} of layer group {place.group}, which is not held")
        self._selections[place.group].gather(place.chunk, self.views[place.group], target)

    def scatter(self, place: ArenaRange, source: torch.Tensor, skip_tokens: int) -> None:
        """Writes `source`, the object view of `place`, into the engine's blocks: what lies in the group's window and
        not in the first `skip_tokens` tokens of the range. A state is written whole."""
        group, chunk_tokens = self._groups[place.group], self.desc.chunk_tokens
        if group.state:
            if place.chunk == self.chunks - 1 and skip_tokens < self.chunks * chunk_tokens:
                self._selections[place.group].scatter(place.chunk, self.views[place.group], source, 0)
            return
        start = max(skip_tokens, self._first_blocks[place.group] * group.block_size)
        skip = max(start - place.chunk * chunk_tokens, 0)
        if skip < chunk_tokens:
            skip_slots = skip // group.slot_tokens
            self._selections[place.group].scatter(place.chunk, self.views[place.group], source, skip_slots)

    def reaches(self, place: ArenaRange, skip_tokens: int) -> bool:
        """False if nothing of `place` would be written by a load that leaves out the first `skip_tokens` tokens."""
        return (place.chunk + 1) * self.desc.chunk_tokens > skip_tokens

    def check_complete(self, ranges: Sequence[ArenaRange]) -> None:
        """Raises `ValueError` if a chunk is missing that must be loaded: each under full attention, those that a window
        reaches, the last one of a state."""
        given = {(place.chunk, place.group) for place in ranges}
        for group, first in enumerate(self.first_chunks):
            missing = [chunk for chunk in range(first, self.chunks) if (chunk, group) not in given]
            if missing:
                raise ValueError(f"the server names no object for chunks {missing} of layer group {group}")

    def each_range(
        self, arena: memoryview, ranges: Sequence[ArenaRange], copy: Callable[[ArenaRange, torch.Tensor], None]
    ) -> None:
        """Calls `copy(range, object view)` for each range. Raises `ValueError` for one that cannot be meant."""
        whole = torch.frombuffer(arena, dtype=torch.uint8)
        for place in ranges:
            if not (0 <= place.group < len(self.views) and 0 <= place.chunk < self.chunks):
                raise ValueError(f"the server names {place}, there are {self.chunks} chunks")
            desc = self.desc.groups[place.group]
            if place.length != desc.nbytes or not 0 <= place.offset <= whole.numel() - place.length:
                raise ValueError(f"the server names {place}, an object has {desc.nbytes} bytes")
            copy(place, object_view(whole, place.offset, desc, self.views[place.group][0][0]))


def _touched(group: LayerGroup, chunk_tokens: int, ids: torch.Tensor, storing: bool) -> tuple[torch.Tensor, int, int]:
    """`touched_blocks` of a tensor. What is not touched becomes block 0, since nothing looks at it."""
    if not (group.window or group.state):
        return ids, chunk_tokens // group.block_size, 0
    used, per_chunk, first = touched_blocks(group, chunk_tokens, ids.tolist(), storing=storing)
    return torch.tensor([0] * first + list(used[first:]), dtype=torch.int64), per_chunk, first


def _as_tensor(ids: Sequence[int], group: int, count: int) -> torch.Tensor:
    if len(ids) != count:
        raise BadBlockIds(f"{len(ids)} block ids", where=f"layer group {group}", available=f"{count} for these tokens")
    try:
        return torch.as_tensor(ids if not isinstance(ids, range) else list(ids), dtype=torch.int64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BadBlockIds(f"block ids are no integers: {error}", where=f"layer group {group}") from None


def _check_range(ids: torch.Tensor, group: int, blocks: int) -> None:
    if not len(ids):
        return
    low, high = ids.aminmax()
    if int(low) < 0 or int(high) >= blocks:
        wrong = int(low) if int(low) < 0 else int(high)
        raise BadBlockIds(f"block id {wrong}", where=f"layer group {group}", available=f"0 to {blocks - 1}")
