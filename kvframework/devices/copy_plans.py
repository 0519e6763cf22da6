"""The plan of a copy: from layout, block ids and arena ranges to batches of equal fragments. Pure and public.

It serves transports that move canonical or opaque objects by address: the copier process of a device, and kernels in
engine processes. Nothing here grows with the number of fragments, only with layers plus blocks: a batch is their
product, see
`CopyBatch`.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from kvframework.api.driver import CopyBatch, Step
from kvframework.api.layout import NO_BLOCK, LayerGroup, MemoryLayoutDesc
from kvframework.api.transport import ArenaRange, GroupBlocks
from kvframework.api.types import dtype_bytes

__all__ = ["CopyPlanner", "PlacedView"]


class PlacedView(NamedTuple):
    """One plane of one layer as `[blocks, slots, heads, dim]`: its address, and its strides in bytes."""

    address: int
    strides: tuple[int, int, int, int]


@dataclass(frozen=True)
class _Lanes:
    """Planes and layers of one group with equal strides: their first blocks' addresses and their rows in an object."""

    strides: tuple[int, int, int, int]
    addresses: array.array[int]
    offsets: array.array[int]


class CopyPlanner:
    """Plans copies between memory seen as `views`, `[group][plane][layer]`, and objects of `desc`.

    `merged`: neighbouring blocks make one long fragment, which a copy engine likes; a kernel has fewer batches
    without.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        desc: MemoryLayoutDesc,
        views: Sequence[Sequence[Sequence[PlacedView]]],
        *,
        merged: bool = True,
    ) -> None:
        self._groups = groups
        self._desc = desc
        self._lanes = [_lanes(planes, desc.groups[index].nbytes) for index, planes in enumerate(views)]
        self._sizes = [_size(group) for group in groups]
        self._merged = merged

    def plan(
        self, ranges: Sequence[ArenaRange], blocks: Sequence[GroupBlocks], skip_tokens: int = 0
    ) -> list[CopyBatch]:
        """Return the copies of a `CopyJob`. `NO_BLOCK` and the first `skip_tokens` tokens are left out. Ranges and
        blocks fit the registration: the core has checked them."""
        places: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for place in ranges:
            group, count = self._groups[place.group], blocks[place.group].per_object
            ids = blocks[place.group].ids[place.chunk * count : (place.chunk + 1) * count]
            skip = 0 if group.state else max(skip_tokens - place.chunk * self._desc.chunk_tokens, 0)
            whole, rest = divmod(skip // group.slot_tokens, group.slots)
            size, offset = self._sizes[place.group], place.offset
            if rest and whole < count and ids[whole] != NO_BLOCK:
                places.setdefault((place.group, 1, rest), []).append((ids[whole], offset + whole * size))
            start = whole + bool(rest)
            if self._merged:
                for first, number, at in _runs(ids, start):
                    places.setdefault((place.group, number, 0), []).append((first, offset + at * size))
            else:
                single = [(each, offset + at * size) for at, each in enumerate(ids) if at >= start and each != NO_BLOCK]
                if single:
                    places.setdefault((place.group, 1, 0), []).extend(single)
        return [batch for key, found in places.items() for batch in self._batches(*key, found)]

    def _batches(self, index: int, number: int, first_slot: int, places: Sequence[tuple[int, int]]) -> list[CopyBatch]:
        """Return runs of `number` blocks, each without its first `first_slot` slots, of all planes and layers."""
        group, size = self._groups[index], dtype_bytes(self._groups[index].dtype)
        batches = []
        for lanes in self._lanes[index]:
            block, slot, *_ = lanes.strides
            counts = (number, group.slots - first_slot, group.heads, group.head_dim)
            steps, run = _fragment(counts, lanes.strides, size, _size(group))
            addresses = array.array("Q", [at * block + first_slot * slot for at, _ in places])
            skipped = first_slot * group.hidden * size
            offsets = array.array("Q", [offset + skipped for _, offset in places])
            batches.append(CopyBatch(lanes.addresses, lanes.offsets, addresses, offsets, steps, run))
        return batches


def _lanes(planes: Sequence[Sequence[PlacedView]], object_bytes: int) -> list[_Lanes]:
    views = [view for plane in planes for view in plane]
    row = object_bytes // len(views)
    numbered = sorted(enumerate(views), key=lambda each: each[1].strides)
    return [
        _Lanes(
            strides,
            array.array("Q", [view.address for _, view in alike]),
            array.array("Q", [at * row for at, _ in alike]),
        )
        for strides, alike in ((key, list(each)) for key, each in groupby(numbered, lambda each: each[1].strides))
    ]


def _size(group: LayerGroup) -> int:
    """Return the bytes of one block in an object, of one plane and layer."""
    return group.slots * group.hidden * dtype_bytes(group.dtype)


def _runs(ids: Sequence[int], start: int) -> list[tuple[int, int, int]]:
    """Return the runs of neighbouring blocks from `start` on, as (first id, number, position of the first in `ids`)."""
    runs = []
    at = start
    while at < len(ids):
        end = at + 1
        if ids[at] != NO_BLOCK:
            while end < len(ids) and ids[end] == ids[end - 1] + 1 and ids[end] != NO_BLOCK:
                end += 1
            runs.append((ids[at], end - at, at))
        at = end
    return runs


def _fragment(
    counts: tuple[int, ...], strides: tuple[int, ...], itemsize: int, block_bytes: int
) -> tuple[tuple[Step, ...], int]:
    """Return the steps, outermost first, and the bytes of one contiguous run. `counts` and `strides` are those of
    block, slot, head and element on the device; in the arena they are contiguous."""
    _, _, heads, dim = counts
    arena = (block_bytes, heads * dim * itemsize, dim * itemsize, itemsize)
    steps: list[Step] = []
    run = itemsize
    for count, device, step in zip(reversed(counts), reversed(strides), reversed(arena), strict=True):
        if count == 1:
            continue
        if not steps and device == step == run:
            run *= count
        elif steps and device == steps[0].device * steps[0].number and step == steps[0].arena * steps[0].number:
            steps[0] = steps[0]._replace(number=steps[0].number * count)
        else:
            steps.insert(0, Step(count, device, step))
    return tuple(steps), run
