"""From vLLM's block ids and places in the arena to the runs of bytes to copy. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec

Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Region:
    """One tensor of vLLM's: the address of its first block, the bytes from one to the next, the bytes of one in the
    arena, and where in a slot those of the chunk's first one are."""

    address: int
    stride: int
    page: int
    offset: int


@dataclass(frozen=True)
class Runs:
    """Bytes to copy: pairs of addresses, in vLLM's memory and in the arena, relative to its begin, and how many."""

    engine: Addresses
    arena: Addresses
    nbytes: Addresses

    @property
    def total(self) -> int:
        return int(self.nbytes.sum())


class Slot:
    """How a worker's blocks lie in an object, from `offset` on. `refs` has for each group the regions of its layers,
    with the bytes of a block that count."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, offset: int) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.offset = offset
        self.regions: list[Region] = []
        self.nbytes = 0
        for each in kv_caches.tensors:
            tensor, page = each.tensor, int(each.page_size_bytes)
            stride = tensor.stride(0) * tensor.element_size()
            self.regions.append(Region(tensor.data_ptr(), stride, page, self.nbytes))
            self.nbytes += page * blocks_per_chunk
        self.refs = [[(ref.tensor_idx, int(ref.page_size_bytes)) for ref in refs] for refs in kv_caches.group_data_refs]

    def placed(self, blocks: GPULoadStoreSpec, offsets: Sequence[int]) -> tuple[GPULoadStoreSpec, list[int]]:
        """Return the blocks of a job whose objects have a place, and these places. `offsets` has one for each object,
        group by group, negative without a place. Raises `ValueError` if the objects are not those of the blocks."""
        per_chunk, places = self.blocks_per_chunk, np.asarray(offsets, dtype=np.int64)
        ids, sizes, indices = [], [], []
        block = chunk = 0
        for count, first in zip(blocks.group_sizes, blocks.block_indices, strict=True):
            chunks = chunk + (first % per_chunk + np.arange(count)) // per_chunk
            end = int(chunks[-1]) + 1 if count else chunk
            if end > len(places):
                break
            kept = places[chunks] >= 0
            ids += blocks.block_ids[block : block + count][kept].tolist()
            sizes.append(int(kept.sum()))
            indices.append(int(first + kept.argmax()) if sizes[-1] else 0)
            block, chunk = block + count, end
        if len(sizes) < len(blocks.group_sizes) or chunk != len(places):
            raise ValueError(f"{len(places)} places for the objects of {len(blocks.block_ids)} blocks")
        return type(blocks)(ids, sizes, indices), places[places >= 0].tolist()

    def runs(self, blocks: GPULoadStoreSpec, offsets: Sequence[int]) -> Runs:
        """Return the runs of the blocks that have a place. Raises as `placed`."""
        blocks, offsets = self.placed(blocks, offsets)
        per_chunk, places = self.blocks_per_chunk, np.asarray(offsets, dtype=np.int64) + self.offset
        parts: list[tuple[Addresses, Addresses, Addresses]] = []
        block = chunk = 0
        for refs, count, first in zip(self.refs, blocks.group_sizes, blocks.block_indices, strict=True):
            within = first % per_chunk + np.arange(count, dtype=np.int64)
            mine = blocks.block_ids[block : block + count].astype(np.int64)
            at, part = places[chunk + within // per_chunk], within % per_chunk
            for index, nbytes in refs:
                region = self.regions[index]
                arena = at + region.offset + part * region.page
                parts.append((region.address + mine * region.stride, arena, np.full(count, nbytes, dtype=np.int64)))
            block, chunk = block + count, chunk + (int(within[-1]) // per_chunk + 1 if count else 0)
        return Runs(*(np.concatenate([np.empty(0, dtype=np.int64), *each]) for each in zip(*parts, strict=True)))
