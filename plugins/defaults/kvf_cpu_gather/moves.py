"""The moves of one transfer's objects between the engine's blocks and memory. Engine side, no server calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from kvf_cpu_gather.engine_memory import EngineMemory, memory_of
from kvf_cpu_gather.kernel import CopyKernel
from kvf_cpu_gather.torch_copies import Piece
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.api.transport import ArenaRange, GroupBlocks, Registration, Transfer
from kvframework.api.types import Buffer
from kvframework.errors import BadBlockIds

if TYPE_CHECKING:
    from kvf_cpu_gather.torch_copies import GroupViews


class Moves:
    """The moves of one transfer. Borrows the engine's tensors. Raises `BadBlockIds` for blocks that these tensors do
    not have, which a registration without a number of blocks cannot check."""

    def __init__(self, transfer: Transfer, memory: EngineMemory) -> None:
        for index, (blocks, count) in enumerate(zip(transfer.blocks, memory.block_counts, strict=True)):
            if blocks.highest >= count:
                raise BadBlockIds(
                    f"block id {blocks.highest}", where=f"layer group {index}", available=f"0 to {count - 1}"
                )
        self.memory = memory
        self._tokens = transfer.tokens
        self._chunk_tokens = transfer.registration.desc.chunk_tokens
        self._copies = memory.copies(transfer.blocks)

    def gather(self, memory: Buffer, places: Sequence[ArenaRange]) -> None:
        """Fill the ranges of `memory` from the engine's blocks."""
        self._copies.gather(_seen(memory), places)

    def scatter(self, memory: Buffer, places: Sequence[ArenaRange], skip_tokens: int) -> None:
        """Write the ranges of `memory` into the engine's blocks, limited to a group's window and without the first
        `skip_tokens` tokens. A state is written whole, unless all tokens are skipped."""
        if skip_tokens < self._tokens:
            self._copies.scatter(_seen(memory), places, skip_tokens)

    def scatter_each(self, parts: Iterable[tuple[Buffer, ArenaRange]], skip_tokens: int) -> None:
        """Do `scatter` for objects that arrived one by one, each whole in a buffer of its own."""
        if skip_tokens < self._tokens:
            self._copies.scatter_each([Piece(place, _seen(memory)) for memory, place in parts], skip_tokens)

    def reaches(self, place: ArenaRange, skip_tokens: int) -> bool:
        """Return False if a load that skips the first `skip_tokens` tokens would write nothing of `place`."""
        return (place.chunk + 1) * self._chunk_tokens > skip_tokens


def _seen(memory: Buffer) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def gather_blocks(
    registration: Registration, views: Sequence[GroupViews], blocks: Sequence[int], kernel: CopyKernel | None
) -> list[bytes]:
    """Return one block of each layer group as the bytes of its canonical form `[planes, layers, slots per block,
    hidden]`, by the copies that stores make."""
    gathered = []
    for group, view, desc, block in zip(
        registration.layout.groups, views, registration.desc.groups, blocks, strict=True
    ):
        planes, layers, _, hidden = desc.shape
        one = GroupDesc((planes, layers, group.slots, hidden), desc.dtype)
        memory = torch.empty(one.nbytes, dtype=torch.uint8)
        seen = memory_of(kernel, [group], MemoryLayoutDesc(group.block_size, (one,)), [view])
        copies = seen.copies([GroupBlocks([block], 1, 0, block)])
        copies.gather(memory, [ArenaRange(0, 0, 0, one.nbytes)])
        gathered.append(bytes(memory.tolist()))
    return gathered
