"""Owns the check of one transfer's arguments against registration and tensors, and of the ranges that the server names.

Engine side, no server calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from kvf_cpu_gather.copying import GroupBlocks, Piece
from kvf_cpu_gather.engine_memory import EngineMemory, memory_of
from kvf_cpu_gather.kernel import CopyKernel
from kvframework.api import (
    ArenaRange,
    BlockIds,
    Buffer,
    CacheKey,
    GroupDesc,
    LayerGroup,
    MemoryLayoutDesc,
    Registration,
    touched_blocks,
)
from kvframework.errors import BadBlockIds, BadRange

if TYPE_CHECKING:
    from kvf_cpu_gather.copying import GroupViews


class Transfer:
    """The checked arguments of one submit: the engine's memory and the blocks of each chunk.

    `first_chunks` is, per layer group, how many chunks a store leaves out, see `touched_blocks`. Borrows the engine's
    tensors. Raises `BadRange` or `BadBlockIds`.
    """

    def __init__(
        self,
        registration: Registration,
        key: CacheKey,
        memory: EngineMemory,
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
        self.memory = memory
        self.groups = len(expected)
        blocks = [self._blocks_of(index, ids, expected[index], storing=storing) for index, ids in enumerate(block_ids)]
        self.first_chunks = [each.first // each.per_chunk for each in blocks]
        self._copies = memory.copies(blocks)

    def gather(self, memory: Buffer, places: Sequence[ArenaRange]) -> None:
        """Fills the ranges of `memory`. Raises `ValueError` for one that cannot be meant, or that the engine does not
        hold."""
        for place in places:
            if not 0 <= place.group < self.groups or place.chunk < self.first_chunks[place.group]:
                raise ValueError(f"the server asks for {place}, which is not held")
        self._copies.gather(self._pieces(memory, places))

    def scatter(self, memory: Buffer, places: Sequence[ArenaRange], skip_tokens: int) -> None:
        """Writes the ranges of `memory` into the engine's blocks: what lies in a group's window and not in the first
        `skip_tokens` tokens. A state is written whole, unless all is skipped. Raises `ValueError` for a range that
        cannot be meant."""
        self._scatter(self._pieces(memory, places), skip_tokens)

    def scatter_each(self, parts: Iterable[tuple[Buffer, ArenaRange]], skip_tokens: int) -> None:
        """`scatter` of objects that came one by one, each whole in a buffer of its own."""
        pieces = [
            piece
            for memory, place in parts
            for piece in self._pieces(memory, [ArenaRange(place.chunk, place.group, 0, place.length)])
        ]
        self._scatter(pieces, skip_tokens)

    def _scatter(self, pieces: Sequence[Piece], skip_tokens: int) -> None:
        if skip_tokens < self.chunks * self.desc.chunk_tokens:
            self._copies.scatter(pieces, skip_tokens)

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

    def _pieces(self, memory: Buffer, places: Sequence[ArenaRange]) -> list[Piece]:
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        pieces = []
        for place in places:
            if not (0 <= place.group < self.groups and 0 <= place.chunk < self.chunks):
                raise ValueError(f"the server names {place}, there are {self.chunks} chunks")
            desc = self.desc.groups[place.group]
            if place.length != desc.nbytes or not 0 <= place.offset <= whole.numel() - place.length:
                raise ValueError(f"the server names {place}, an object has {desc.nbytes} bytes")
            pieces.append(Piece(place, whole[place.offset : place.offset + place.length]))
        return pieces

    def _blocks_of(self, index: int, ids: Sequence[int], per_chunk: int, *, storing: bool) -> GroupBlocks:
        whole = _as_tensor(ids, index, per_chunk * self.chunks)
        used, per_object, first = _touched(self.layout.groups[index], self.desc.chunk_tokens, whole, storing)
        _check_range(used[first:], index, self.memory.block_counts[index])
        return GroupBlocks(used, per_object, first)


def gather_blocks(
    registration: Registration, views: Sequence[GroupViews], blocks: Sequence[int], kernel: CopyKernel | None
) -> list[bytes]:
    """One block of each layer group as the bytes of its canonical form `[planes, layers, slots per block, hidden]`, by
    the copies that stores make."""
    gathered = []
    for group, view, desc, block in zip(
        registration.layout.groups, views, registration.desc.groups, blocks, strict=True
    ):
        planes, layers, _, hidden = desc.shape
        one = GroupDesc((planes, layers, group.slots, hidden), desc.dtype)
        memory = torch.empty(one.nbytes, dtype=torch.uint8)
        seen = memory_of(kernel, [group], MemoryLayoutDesc(group.block_size, (one,)), [view])
        copies = seen.copies([GroupBlocks(torch.tensor([block], dtype=torch.int64), 1, 0)])
        copies.gather([Piece(ArenaRange(0, 0, 0, one.nbytes), memory)])
        gathered.append(bytes(memory.tolist()))
    return gathered


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
