"""Shards: objects whose names and bytes do not depend on how an engine splits its model. Engine side, pure.

The operator's `tp_lcm` and `pp_lcm` are common multiples of the tensor- and pipeline-parallel sizes of the fleet. A
model of H KV heads and N layers has S = gcd(tp_lcm, H) shards of heads times Q = gcd(pp_lcm, N) of layers: what one
rank would hold if the model were split that far. Shard (s, q) has the heads from s * H / S and the layers from q * N /
Q on, is named as rank q * S + s of S * Q, and holds the canonical objects of such a rank. An engine's rank holds whole
shards, several or one, which other ranks may hold, too (MLA, and more ranks than KV heads)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from msgspec.structs import replace

from kvframework.api.layout import CANONICAL, MAX_GROUPS, BlockViews, KVLayout, LayerTensors, Layout, MemoryLayoutDesc
from kvframework.errors import BadLayout
from kvframework.wire.messages import MAX_HANDLES
from kvframework.wire.protocol import natural

# Handles that are left for allocations, beside those of the views.
_ALLOCATIONS = 256


@dataclass(frozen=True)
class ModelPart:
    """The part of its model that an engine's rank holds: what only the engine's integration knows.

    `kv_heads` are the KV heads of the whole model, equal in all layers; 1 for MLA. Rank `tp_rank` of `tp_size` holds
    the heads from `tp_rank * kv_heads // tp_size` on: `kv_heads / tp_size` of them, or one that other ranks hold, too.
    The registered layers are those from `first_layer` on, of all `layers` of the model that have KV, in their order; 0
    layers: all are registered. `stage` follows the revision in names that are not of shards: a pipeline stage's."""

    kv_heads: int
    tp_rank: int = 0
    tp_size: int = 1
    first_layer: int = 0
    layers: int = 0
    stage: str = ""


@dataclass(frozen=True)
class Shards:
    """The shards of one instance: `ranks` of `world_size`. `split` is what names say of the model: KV heads, shards of
    them, layers, shards of them."""

    ranks: tuple[int, ...]
    world_size: int
    split: tuple[int, ...]
    heads: int
    layers: int
    columns: int

    def layout(self, declared: KVLayout) -> KVLayout:
        """Return the layer groups of each shard, shard by shard."""
        if len(self.ranks) == 1:
            return declared
        groups = []
        for row, _ in self._places():
            for group in declared.groups:
                span = self._span(row, group.num_layers)
                layers, names = span.stop - span.start, group.layer_names[span]
                groups.append(replace(group, heads=self.heads, num_layers=layers, layer_names=names))
        return replace(declared, groups=tuple(groups))

    def views(self, whole: BlockViews) -> BlockViews:
        """Return the views of each shard's layer groups, see `Layout.block_views`, as parts of the `whole` ones."""
        return [
            [
                [view.narrow(2, column * self.heads, self.heads) for view in plane[self._span(row, len(plane))]]
                for plane in planes
            ]
            for row, column in self._places()
            for planes in whole
        ]

    def whole_blocks(self, declared: KVLayout, gathered: Sequence[bytes]) -> list[bytes]:
        """Return the bytes of one block of each declared layer group from its parts, as `gather_block` gives them."""
        count, found = len(declared.groups), []
        for index, group in enumerate(declared.groups):
            parts, layers = gathered[index::count], self.layers or group.num_layers
            width = len(parts[0]) // (group.planes * layers * group.slots)
            # By plane, row of layers, layer and slot; within it the columns of heads lie side by side.
            whole = [
                part[at : at + width]
                for plane in range(group.planes)
                for row in range(0, len(parts), self.columns)
                for at in range(plane * layers * group.slots * width, (plane + 1) * layers * group.slots * width, width)
                for part in parts[row : row + self.columns]
            ]
            found.append(b"".join(whole))
        return found

    def _places(self) -> list[tuple[int, int]]:
        """Return the row of layers and the column of heads of each shard, counted within the instance."""
        return [divmod(index, self.columns) for index in range(len(self.ranks))]

    def _span(self, row: int, layers: int) -> slice:
        return slice(row * self.layers, (row + 1) * self.layers) if self.layers else slice(0, layers)


class ShardedLayout(Layout):
    """A layout plugin, seen by transports as that of an instance's shards."""

    def __init__(self, layout: Layout, declared: KVLayout, shards: Shards) -> None:
        self.name = layout.name
        self._layout, self._declared, self._shards = layout, declared, shards

    def describe(self, kv_caches: Mapping[str, LayerTensors], *, block_size: int) -> KVLayout:
        return self._shards.layout(self._layout.describe(kv_caches, block_size=block_size))

    def block_views(self, layout: KVLayout, kv_caches: Mapping[str, LayerTensors]) -> BlockViews:
        return self._shards.views(self._layout.block_views(self._declared, kv_caches))

    def object_desc(self, layout: KVLayout, chunk_size: int) -> MemoryLayoutDesc:
        return self._layout.object_desc(layout, chunk_size)


def shards_of(declared: KVLayout, desc: MemoryLayoutDesc, part: ModelPart, *, tp_lcm: int, pp_lcm: int) -> Shards:
    """Return the shards of an instance. Raises `BadLayout`, with the reason, for what may not be whole shards."""
    heads, size, rank = part.kv_heads, part.tp_size, part.tp_rank
    if heads < 1 or not 0 <= rank < size:
        raise _refused(f"the model has {heads} KV heads, and this is rank {rank} of {size}")
    if part.stage and not part.layers:
        raise _refused("the layer numbers of this pipeline stage are unknown")
    if tp_lcm % size:
        raise _refused(f"the tensor-parallel size {size} does not divide tp_lcm, {tp_lcm}")
    if heads % size and size % heads:
        raise _refused(f"{heads} KV heads cannot be split to {size} ranks")
    own = max(heads // size, 1)
    for index, (group, stored) in enumerate(zip(declared.groups, desc.groups, strict=True)):
        if group.packing or group.state or stored.form != CANONICAL:
            kind = "recurrent states" if group.state else "opaque blocks"
            raise _refused(f"layer group {index} holds {kind}, which cannot be split between ranks")
        if group.heads != own:
            text = f"layer group {index} has {group.heads} KV heads, expected {own} of {heads} on a rank of {size}"
            raise _refused(text)
        if stored.shape[-1] != group.hidden or stored.shape[:2] != (group.planes, group.num_layers):
            raise _refused(f"the objects of layer group {index} have the shape {stored.shape}")
    columns = gcd(tp_lcm, heads)
    width = max(columns // size, 1)
    rows, height, layers = _layer_ranges(declared, part, pp_lcm)
    first = rank * columns // size
    parts = layers // height
    ranks = tuple(row * columns + column for row in rows for column in range(first, first + width))
    if len(ranks) * len(declared.groups) > MAX_GROUPS:
        raise _refused(f"the split has more than {MAX_GROUPS} layer groups")
    if sum(group.planes * group.num_layers for group in declared.groups) * width > MAX_HANDLES - _ALLOCATIONS:
        raise _refused(f"the split has more than {MAX_HANDLES - _ALLOCATIONS} views of the engine's memory")
    split, heads = (heads, columns, layers, parts), heads // columns
    return Shards(ranks, columns * parts, split, heads, height if parts > 1 else 0, width)


def _layer_ranges(declared: KVLayout, part: ModelPart, pp_lcm: int) -> tuple[range, int, int]:
    """Return the ranges of layers that the instance holds, by number, the layers of one, and those of the model. Raises
    `BadLayout`. Layers of several groups stay together."""
    names = [name for group in declared.groups for name in group.layer_names]
    here = len(set(names)) or sum(group.num_layers for group in declared.groups)
    layers, first = part.layers or here, part.first_layer
    parts = gcd(pp_lcm, layers) if len(declared.groups) == 1 else 1
    height = layers // parts
    if first < 0 or first + here > layers or first % height or here % height:
        raise _refused(
            f"the {here} layers from layer {first} on, of {layers}, are not whole ranges of {height} layers",
            hint="give every engine pipeline stages whose number divides pp_lcm",
        )
    if parts > 1 and names != sorted(names, key=natural):
        raise _refused("the layers are not in the order of their names")
    return range(first // height, (first + here) // height), height, layers


def _refused(fact: str, hint: str = "") -> BadLayout:
    return BadLayout(fact, where="shards", hint=hint)
