"""The layouts that the transport kit tries, and the model of the place of each element. Pure, no torch.

The model knows nothing of layout plugins or planning: it counts, element by element, from the declared axes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from kvframework.api.plugin import DTYPE_BYTES

CHUNK = 16
# A tensor of a model: group, layer, plane (-1: held by the tensor itself).
Name = tuple[int, int, int]


@dataclass(frozen=True)
class GroupCase:
    """One layer group: its sizes, and the axes in which the engine holds it."""

    axes: tuple[str, ...]
    layers: int = 2
    planes: int = 2
    heads: int = 2
    dim: int = 3
    dtype: str = "float32"
    block_size: int = 4
    compress_ratio: int = 1
    window: int = 0
    state: bool = False
    opaque: bool = False

    @property
    def slots(self) -> int:
        return 1 if self.state else self.block_size // self.compress_ratio

    @property
    def units(self) -> int:
        """Slots that may be written alone: an opaque block is one unit."""
        return 1 if self.opaque else self.slots

    def table(self, pattern: str, index: int) -> dict[str, object]:
        """Return the group in the layout's options."""
        common = {"layers": [pattern], "block_size": self.block_size, "window": self.window, "state": self.state}
        if self.opaque:
            return {**common, "block_axis": self.axes.index("block")}
        return {**common, "axes": list(self.axes), "compress_ratio": self.compress_ratio}

    def shapes(self, blocks: int) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return the shape of each tensor by (layer, plane); -1 for an axis that the tensor itself holds."""
        sizes = {"layer": self.layers, "plane": self.planes, "block": blocks, "token": self.slots}
        sizes |= {"head": self.heads, "dim": self.dim}
        if "block" not in self.axes:
            sizes["token"] *= blocks
        shape = tuple(sizes[axis] for axis in self.axes)
        lanes = product(range(self.layers), range(self.planes))
        return dict.fromkeys((self.held_apart(layer, plane) for layer, plane in lanes), shape)

    def held_apart(self, layer: int, plane: int) -> tuple[int, int]:
        """Return which tensor has a layer's plane."""
        return (-1 if "layer" in self.axes else layer, -1 if "plane" in self.axes else plane)


PAGED = {
    "nhd": [GroupCase(("plane", "block", "token", "head", "dim"))],
    "hnd": [GroupCase(("block", "plane", "head", "token", "dim"), dtype="bfloat16")],
    "dim_before_token": [GroupCase(("block", "head", "dim", "token"), dtype="float16")],
    "all_layers_in_one": [GroupCase(("block", "layer", "plane", "token", "head", "dim"), layers=3)],
    "pairs_of_flat_tokens": [GroupCase(("token", "head", "dim"), dtype="uint8")],
    "latent": [GroupCase(("block", "token", "dim"), planes=1, heads=1, dim=5, layers=3)],
    "window": [GroupCase(("plane", "block", "token", "head", "dim"), window=10)],
    "state": [
        GroupCase(("block", "token", "head", "dim")),
        GroupCase(("block", "dim"), planes=1, heads=1, dim=7, state=True),
    ],
    "hybrid": [
        GroupCase(("plane", "block", "head", "token", "dim"), block_size=8),
        GroupCase(("block", "token", "head", "dim"), layers=3, window=20, block_size=4),
        GroupCase(("block", "dim"), layers=1, planes=1, heads=1, dim=6, state=True, block_size=16),
        GroupCase(("block", "token", "dim"), layers=1, planes=1, heads=1, compress_ratio=4, block_size=16),
    ],
}
NHD = PAGED["nhd"]
OPAQUE = {
    "opaque": [
        GroupCase(("block", "token", "head", "dim"), opaque=True, dtype="bfloat16"),
        GroupCase(("block", "token", "dim"), planes=1, heads=1, layers=1, opaque=True, window=9),
    ]
}
CASES = {**PAGED, **OPAQUE}


class MemoryModel:
    """The expected bytes of an engine's tensors: `images` by tensor. Starts with random bytes."""

    def __init__(self, groups: Sequence[GroupCase], blocks: Sequence[int], seed: int) -> None:
        self.groups = groups
        self.blocks = blocks
        source = random.Random(seed)  # noqa: S311 - repeatable test data
        self.shapes: dict[Name, tuple[int, ...]] = {
            (index, *name): shape
            for index, (group, count) in enumerate(zip(groups, blocks, strict=True))
            for name, shape in group.shapes(count).items()
        }
        self.images = {
            name: bytearray(source.randbytes(math.prod(shape) * DTYPE_BYTES[groups[name[0]].dtype]))
            for name, shape in self.shapes.items()
        }

    def copy_slots(self, other: MemoryModel, group: int, source: int, target: int, slots: Sequence[int]) -> None:
        """Copy the slots of block `source` of `other` into block `target` here."""
        for slot in slots:
            there, here = other.elements(group, source, slot), self.elements(group, target, slot)
            for (from_name, from_place), (to_name, to_place) in zip(there, here, strict=True):
                self.images[to_name][to_place] = other.images[from_name][from_place]

    def canonical_block(self, index: int, block: int) -> bytes:
        """Return the bytes of one block as `[planes, layers, slots, hidden]`, or the raw block of an opaque group."""
        group = self.groups[index]
        lanes = product(range(group.planes), range(group.layers), range(group.slots))
        places = (each for plane, layer, slot in lanes for each in self._lane(index, block, layer, plane, slot))
        return b"".join(self.images[name][place] for name, place in places)

    def elements(self, index: int, block: int, slot: int) -> Iterator[tuple[Name, slice]]:
        """Yield every element of one slot as (tensor, its bytes), in the same order for all axes."""
        group = self.groups[index]
        slots = range(group.slots) if group.opaque else [slot]
        for layer, plane, at in product(range(group.layers), range(group.planes), slots):
            yield from self._lane(index, block, layer, plane, at)

    def _lane(self, index: int, block: int, layer: int, plane: int, slot: int) -> Iterator[tuple[Name, slice]]:
        group = self.groups[index]
        name, nbytes = (index, *group.held_apart(layer, plane)), DTYPE_BYTES[group.dtype]
        token = slot if "block" in group.axes else block * group.slots + slot
        for head, dim in product(range(group.heads), range(group.dim)):
            places = {"layer": layer, "plane": plane, "block": block, "token": token, "head": head, "dim": dim}
            offset = 0
            for axis, size in zip(group.axes, self.shapes[name], strict=True):
                offset = offset * size + places[axis]
            yield name, slice(offset * nbytes, (offset + 1) * nbytes)


def loaded_slots(group: GroupCase, blocks: int, skip_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """Yield each written block of a load of `blocks` blocks, and its written slots: token by token, by definition."""
    tokens = blocks * group.block_size
    for at in range(blocks):
        if group.state and at != blocks - 1:
            continue
        if group.window and (at + 1) * group.block_size <= tokens - group.window:
            continue
        width = group.block_size // group.units
        slots = [unit for unit in range(group.units) if at * group.block_size + (unit + 1) * width > skip_tokens]
        if slots:
            yield at, slots
