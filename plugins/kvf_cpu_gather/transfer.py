"""Owns the check of one transfer's arguments against registration and tensors, and of the ranges that the server names.

Engine side, no server calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from kvf_cpu_gather.copying import BlockSelection, object_view
from kvframework.api import ArenaRange, BlockIds, CacheKey, LayerTensors, Layout, Registration
from kvframework.errors import BadBlockIds, BadRange

if TYPE_CHECKING:
    from kvf_cpu_gather.copying import GroupViews


class Transfer:
    """The checked arguments of one submit: views of the engine's memory and the blocks of each chunk.

    Borrows the engine's tensors. Raises `BadRange`, `BadBlockIds` or `BadLayout`.
    """

    def __init__(
        self,
        registration: Registration,
        layout: Layout,
        key: CacheKey,
        kv_caches: Mapping[str, LayerTensors],
        block_ids: BlockIds,
        blocks_in_chunk: Sequence[int],
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
        self.compress_ratios = [group.compress_ratio for group in registration.layout.groups]
        self.views: list[GroupViews] = list(layout.block_views(registration.layout, kv_caches))
        self.selections = [
            BlockSelection(_checked_ids(ids, group, count * self.chunks, self.views[group][0][0].shape[0]), count)
            for group, (ids, count) in enumerate(zip(block_ids, expected, strict=True))
        ]

    def check_complete(self, ranges: Sequence[ArenaRange]) -> None:
        """Raises `ValueError` if a chunk is missing that must be loaded: each under full attention, the last one of a
        window or state (those before it may be of no use any more)."""
        given = {(place.chunk, place.group) for place in ranges}
        for group, desc in enumerate(self.desc.groups):
            first = self.chunks - 1 if desc.window else 0
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


def _checked_ids(ids: Sequence[int], group: int, count: int, blocks: int) -> torch.Tensor:
    if len(ids) != count:
        raise BadBlockIds(f"{len(ids)} block ids", where=f"layer group {group}", available=f"{count} for these tokens")
    try:
        checked = torch.as_tensor(ids if not isinstance(ids, range) else list(ids), dtype=torch.int64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BadBlockIds(f"block ids are no integers: {error}", where=f"layer group {group}") from None
    low, high = checked.aminmax()
    if int(low) < 0 or int(high) >= blocks:
        wrong = int(low) if int(low) < 0 else int(high)
        raise BadBlockIds(f"block id {wrong}", where=f"layer group {group}", available=f"0 to {blocks - 1}")
    return checked
