"""From vLLM's block ids and places in the arena to the runs of bytes to copy. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvf_vllm.facts import layer_specs
from kvframework.errors import BadLayout

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, GPULoadStoreSpec

Addresses = npt.NDArray[np.int64]


# Where the server places objects: their offsets are multiples.
ROW = 4096


@dataclass(frozen=True)
class Region:
    """One tensor of vLLM's: the address of its first block, the bytes from one to the next, the bytes of one in the
    arena, and where in a slot those of the chunk's first one are."""

    address: int
    stride: int
    page: int
    offset: int


@dataclass(frozen=True)
class Part:
    """What counts of a layer's block: fragments, by where they begin in vLLM's block and in the arena's, and their
    bytes. Of `writers` workers with the same bytes each stores every so many-th block, from `writer` on."""

    region: int
    engine: Addresses
    arena: Addresses
    nbytes: Addresses
    writers: int = 1
    writer: int = 0

    @classmethod
    def of(cls, ref: CanonicalKVCacheRef, *, canonical: bool) -> Part:
        """Raise `BadLayout` if vLLM has no canonical form of the layer's blocks."""
        if not canonical:
            fragments, mapping = [(0, 0, int(ref.page_size_bytes))], None
        else:
            mapping = ref.mapping
            if mapping is None or not mapping.parallelism_agnostic:
                raise BadLayout(
                    "canonical_layout is set, but vLLM has no canonical form of this engine's blocks",
                    where="kv_connector_extra_config",
                    hint="leave canonical_layout out",
                )
            fragments = [
                (run.local_offset + n * run.local_stride, run.canonical_offset + n * run.canonical_stride, size)
                for run in mapping.runs
                for size in [run.fragment_size]
                for n in range(run.num_fragments)
            ]
        engine, arena, nbytes = np.asarray(fragments, dtype=np.int64).T
        part = cls(ref.tensor_idx, engine, arena, nbytes)
        return part if mapping is None else replace(part, writers=mapping.num_writers, writer=mapping.writer_index)


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
    """How a worker's blocks lie in an object, from `offset` on. `parts` has for each group those of its layers. In
    vLLM's `canonical` layout a block has the heads of all workers, and each copies its own. Raises as `Part.of`."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, offset: int, *, canonical: bool = False
    ) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self.offset = offset
        self.canonical = canonical
        self.parts = [[Part.of(ref, canonical=canonical) for ref in refs] for refs in kv_caches.group_data_refs]
        pages = [int(each.page_size_bytes) for each in kv_caches.tensors]
        if canonical:
            pages = [0] * len(pages)
            for ref in chain.from_iterable(kv_caches.group_data_refs):
                pages[ref.tensor_idx] = max(pages[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
        self.regions: list[Region] = []
        self.nbytes = 0
        for each, page in zip(kv_caches.tensors, pages, strict=True):
            stride = each.tensor.stride(0) * each.tensor.element_size()
            self.regions.append(Region(each.tensor.data_ptr(), stride, page, self.nbytes))
            self.nbytes += page * blocks_per_chunk

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

    def runs(self, blocks: GPULoadStoreSpec, offsets: Sequence[int], *, storing: bool) -> Runs:
        """Return the runs of the blocks that have a place. Raises as `placed`."""
        blocks, offsets = self.placed(blocks, offsets)
        per_chunk, places = self.blocks_per_chunk, np.asarray(offsets, dtype=np.int64)
        runs: list[tuple[Addresses, Addresses, Addresses]] = []
        block = chunk = 0
        for parts, count, first in zip(self.parts, blocks.group_sizes, blocks.block_indices, strict=True):
            within = first % per_chunk + np.arange(count, dtype=np.int64)
            mine = blocks.block_ids[block : block + count].astype(np.int64)
            at, index = places[chunk + within // per_chunk], within % per_chunk
            for part in parts:
                region = self.regions[part.region]
                engine = region.address + mine * region.stride
                arena = at + self.offset + region.offset + index * region.page
                if storing and part.writers > 1:
                    # As vLLM's handler chooses, which counts the blocks of the arena's rows.
                    chosen = (at // ROW * per_chunk + index) % part.writers == part.writer
                    engine, arena = engine[chosen], arena[chosen]
                runs.append(
                    (
                        np.add.outer(engine, part.engine).ravel(),
                        np.add.outer(arena, part.arena).ravel(),
                        np.tile(part.nbytes, len(engine)),
                    )
                )
            block, chunk = block + count, chunk + (int(within[-1]) // per_chunk + 1 if count else 0)
        return Runs(*(np.concatenate([np.empty(0, dtype=np.int64), *each]) for each in zip(*runs, strict=True)))


def order_of(kv_cache_config: Any, memory: Mapping[str, torch.Tensor], *, canonical: bool) -> str:
    """Return a name for the place of each layer's bytes in an object: the tensor, in the order in which vLLM's worker
    side lists them, and the byte within a block that holds several layers. vLLM's `canonical` pages hold one layer."""
    regions: dict[tuple[int, int], int] = {}
    places: list[tuple[object, ...]] = []
    for group in kv_cache_config.kv_cache_groups:
        specs = layer_specs(group.kv_cache_spec)
        for name in group.layer_names:
            if (tensor := memory.get(name)) is None:
                continue
            row = tensor.stride(0) * tensor.element_size()
            stride = row * (tensor.shape[0] // kv_cache_config.num_blocks)
            region = regions.setdefault((tensor.data_ptr(), stride), len(regions))
            at: tuple[int, ...] = ()
            if not canonical and stride != (specs[name] if name in specs else specs[""]).page_size_bytes:
                at = (stride, tensor.storage_offset() * tensor.element_size() % stride)
            places.append((name, region, *at))
    return hashlib.blake2b(json.dumps(places).encode(), digest_size=8, person=b"kvf-vllm-order").hexdigest()
