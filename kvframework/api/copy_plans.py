"""The plan of a copy: from layout, block ids and arena ranges to batches of equal fragments. Pure.

It serves transports that move objects by address: the copier process of a device, and kernels in engine processes.
Nothing grows with the number of fragments, only with layers plus blocks: a batch is their product, see `CopyBatch`.
"""

from __future__ import annotations

import array
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from msgspec.structs import replace

from kvframework.api.layout import NO_BLOCK, BlockViews, GroupDesc, LayerGroup, MemoryLayoutDesc, TensorLike
from kvframework.api.plugin import dtype_bytes
from kvframework.api.transport import ArenaRange, GroupBlocks

__all__ = ["CopyBatch", "CopyPlanner", "PlacedView", "Step", "one_block", "placed"]


class Step(NamedTuple):
    """`number` equal pieces, `device` bytes apart on the device and `arena` bytes apart in the arena."""

    number: int
    device: int
    arena: int


@dataclass(frozen=True)
class CopyBatch:
    """Equal fragments of `run` bytes, as a product: every lane x every place x all `steps`, outermost first.

    A lane is one layer of one plane, a place one block (or several neighbours) of one object. The device address of a
    fragment is `lane_addresses[i] + place_addresses[j] +` its steps' `device` parts, its arena offset the same sum of
    offsets and `arena` parts. `fragments` writes the product out for a plain batched copy.
    """

    lane_addresses: array.array[int]
    lane_offsets: array.array[int]
    place_addresses: array.array[int]
    place_offsets: array.array[int]
    steps: tuple[Step, ...]
    run: int

    @property
    def count(self) -> int:
        """Number of fragments."""
        each = math.prod(step.number for step in self.steps)
        return len(self.lane_addresses) * len(self.place_addresses) * each

    @property
    def nbytes(self) -> int:
        """Bytes that the batch copies."""
        return self.count * self.run

    def fragments(self) -> tuple[array.array[int], array.array[int], int]:
        """Device addresses, arena offsets (both u64, in the same order), and the length of each fragment in bytes."""
        return (
            _product(self.lane_addresses, self.place_addresses, [(step.number, step.device) for step in self.steps]),
            _product(self.lane_offsets, self.place_offsets, [(step.number, step.arena) for step in self.steps]),
            self.run,
        )

    def split(self, limit: int) -> Iterator[CopyBatch]:
        """Yield batches of at most `limit` bytes each; a batch has at least one place of one lane."""
        cell = self.nbytes // (len(self.lane_addresses) * len(self.place_addresses))
        cells = max(limit // cell, 1)
        places = min(cells, len(self.place_addresses))
        yield from self.tiles(max(cells // places, 1), places)

    def tiles(self, lanes: int, places: int) -> Iterator[CopyBatch]:
        """Yield batches of at most `lanes` lanes and `places` places each."""
        for lane in range(0, len(self.lane_addresses), lanes):
            for place in range(0, len(self.place_addresses), places):
                yield CopyBatch(
                    self.lane_addresses[lane : lane + lanes],
                    self.lane_offsets[lane : lane + lanes],
                    self.place_addresses[place : place + places],
                    self.place_offsets[place : place + places],
                    self.steps,
                    self.run,
                )


class PlacedView(NamedTuple):
    """One plane of one layer as `[blocks, slots, heads, dim]`: its address, and its strides in bytes."""

    address: int
    strides: tuple[int, int, int, int]


def placed(views: BlockViews) -> list[list[list[PlacedView]]]:
    """Return the places of `Layout.block_views`, for a `CopyPlanner`."""

    def place(view: TensorLike) -> PlacedView:
        block, slot, head, element = (step * view.element_size() for step in view.stride())
        return PlacedView(view.data_ptr(), (block, slot, head, element))

    return [[[place(view) for view in plane] for plane in planes] for planes in views]


def one_block(group: LayerGroup, block: int) -> tuple[MemoryLayoutDesc, ArenaRange, GroupBlocks]:
    """Return the object of one block in canonical form, its range in `group.block_bytes` of memory, and its blocks: for
    `gather_block`, by `CopyPlanner([group], desc, [views[group]]).plan([place], [blocks])`."""
    one = GroupDesc((group.planes, group.num_layers, group.slots, group.hidden), group.dtype)
    place, blocks = ArenaRange(0, 0, 0, one.nbytes), GroupBlocks([block], 1, 0, block)
    return MemoryLayoutDesc(group.block_size, (one,)), place, blocks


@dataclass(frozen=True)
class _Lanes:
    """Planes and layers of one group with equal strides: their first blocks' addresses and their rows in an object."""

    strides: tuple[int, int, int, int]
    addresses: array.array[int]
    offsets: array.array[int]


# Group, blocks in a run, first slot, and columns with their distance: what the fragments of one batch have in common.
_Alike = tuple[int, int, int, int, int]


class _Places(NamedTuple):
    """First blocks of runs, and where in the arena each run begins."""

    ids: list[int]
    offsets: list[int]

    def add(self, ids: Iterable[int], offsets: Iterable[int]) -> None:
        self.ids.extend(ids)
        self.offsets.extend(offsets)


class CopyPlanner:
    """Plans copies between memory seen as `views`, `[group][plane][layer]` (see `placed`), and objects of `desc`: those
    of a `Registration`. Valid as long as the tensors keep their addresses.

    `merged`: neighbouring blocks make one long fragment, for copy engines; a kernel has fewer batches without.
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
        # By group: the bytes from its views to those of the next group, if these are shards of the same heads, else 0.
        self._beside = [] if merged else _beside(groups, self._lanes)

    def plan(
        self, ranges: Sequence[ArenaRange], blocks: Sequence[GroupBlocks], skip_tokens: int = 0, *, joined: bool = False
    ) -> list[CopyBatch]:
        """Return the copies of a `CopyJob`, or of a plan's `ranges` and a transfer's `blocks`. `NO_BLOCK` and the first
        `skip_tokens` tokens are left out. Ranges and blocks fit the registration: the core has checked them. `joined`:
        shards that lie side by side in both memories are one batch, by which a kernel reads the engine's memory once,
        from its beginning to its end."""
        places: defaultdict[_Alike, _Places] = defaultdict(lambda: _Places([], []))
        columned = self._columns(ranges, blocks) if joined and any(self._beside) else ((each, 1, 0) for each in ranges)
        for place, columns, distance in columned:
            group, count = self._groups[place.group], blocks[place.group].per_object
            ids = blocks[place.group].ids[place.chunk * count : (place.chunk + 1) * count]
            size, offset = self._sizes[place.group], place.offset
            skip = 0 if group.state else max(skip_tokens - place.chunk * self._desc.chunk_tokens, 0)
            start = 0
            if skip:
                whole, rest = divmod(skip // group.slot_tokens, group.slots)
                if rest and whole < count and ids[whole] != NO_BLOCK:
                    rest_of_one = places[place.group, 1, rest, columns, distance]
                    rest_of_one.add([ids[whole]], [offset + whole * size])
                start = whole + bool(rest)
            if self._merged:
                for first, number, at in _runs(ids, start):
                    places[place.group, number, 0, 1, 0].add([first], [offset + at * size])
                continue
            kept = ids[start:]
            offsets: Iterable[int] = range(offset + start * size, offset + len(ids) * size, size)
            if NO_BLOCK in kept:
                offsets = [at for at, each in zip(offsets, kept, strict=True) if each != NO_BLOCK]
                kept = [each for each in kept if each != NO_BLOCK]
            if kept:
                places[place.group, 1, 0, columns, distance].add(kept, offsets)
        return [batch for key, found in places.items() for batch in self._batches(*key, found)]

    def _columns(
        self, ranges: Sequence[ArenaRange], blocks: Sequence[GroupBlocks]
    ) -> Iterator[tuple[ArenaRange, int, int]]:
        """Yield the ranges, those of shards that lie side by side as the first one with their number and distance."""
        at = 0
        while at < len(ranges):
            first, end, distance = ranges[at], at + 1, 0
            beside, held = self._beside[first.group], blocks[first.group]
            while beside and end < len(ranges):
                place, columns = ranges[end], end - at
                distance = distance or place.offset - first.offset
                if (
                    place.chunk != first.chunk
                    or place.group != first.group + columns
                    or self._beside[place.group - 1] != beside
                    or blocks[place.group] is not held
                    or place.offset - first.offset != columns * distance
                    or distance < 0
                ):
                    break
                end += 1
            yield first, end - at, distance if end - at > 1 else 0
            at = end

    def _batches(
        self, index: int, number: int, first_slot: int, columns: int, distance: int, places: _Places
    ) -> list[CopyBatch]:
        """Return runs of `number` blocks, each without its first `first_slot` slots, of all planes and layers; of
        `columns` shards, `distance` bytes apart in the arena."""
        group, size = self._groups[index], dtype_bytes(self._groups[index].dtype)
        skipped = first_slot * group.hidden * size
        offsets = array.array("Q", [each + skipped for each in places.offsets] if skipped else places.offsets)
        counts = (number, group.slots - first_slot, group.heads, group.head_dim)
        batches = []
        for lanes in self._lanes[index]:
            block, begin = lanes.strides[0], first_slot * lanes.strides[1]
            steps, run = _fragment(counts, lanes.strides, size, self._sizes[index])
            if columns > 1:
                steps = (Step(columns, self._beside[index], distance), *steps)
            addresses = array.array("Q", [at * block + begin for at in places.ids])
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


def _beside(groups: Sequence[LayerGroup], lanes: Sequence[Sequence[_Lanes]]) -> list[int]:
    """Return for each group how far behind its views those of the next one lie, 0 for another form or distance."""
    found = []
    forms = [
        (replace(group, layer_names=()), [(each.strides, each.offsets) for each in lanes[index]])
        for index, group in enumerate(groups)
    ]
    places = [[address for each in planes for address in each.addresses] for planes in lanes]
    for index in range(len(groups) - 1):
        distance = 0
        if forms[index] == forms[index + 1]:
            distances = {there - here for here, there in zip(places[index], places[index + 1], strict=True)}
            distance = distances.pop() if len(distances) == 1 else 0
        found.append(max(distance, 0))
    return [*found, 0]


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


@lru_cache(maxsize=256)  # a planner asks for the same few again and again
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


def _product(lanes: array.array[int], places: array.array[int], steps: list[tuple[int, int]]) -> array.array[int]:
    inner = array.array("Q", [0])
    for number, distance in reversed(steps):
        inner = _sums(array.array("Q", [at * distance for at in range(number)]), inner)
    return _sums(lanes, _sums(places, inner))


def _sums(outer: array.array[int], inner: array.array[int]) -> array.array[int]:
    """Return every one of `outer` plus every one of `inner`, as one addition of two long integers: no sum has more than
    64 bits, so none reaches the next. Measured: a third of the time of a loop."""
    size = inner.itemsize
    repeated = inner.tobytes() * len(outer)
    spread = b"".join([each.to_bytes(size, sys.byteorder) * len(inner) for each in outer])
    total = int.from_bytes(repeated, sys.byteorder) + int.from_bytes(spread, sys.byteorder)
    return array.array("Q", total.to_bytes(len(repeated), sys.byteorder))
