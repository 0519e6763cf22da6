"""Owns the words for how KV lies in an engine's tensors and in one stored object, and the `Layout` contract.

Pure declarations: nothing here imports torch at run time, so a server uses it without torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Union

from kvframework.api.types import Message, dtype_bytes
from kvframework.errors import BadLayout

if TYPE_CHECKING:
    import torch

AXES = ("plane", "block", "token", "head", "dim")
MAX_OBJECT_BYTES = 1 << 30
MAX_GROUPS = 64

# What an engine holds for one layer: one tensor, or one per plane (K, V).
LayerTensors = Union["torch.Tensor", Sequence["torch.Tensor"]]


class LayerGroup(Message, frozen=True):
    """Layers that share block size, shape, dtype and window.

    `axes` names the axes of one layer's tensor, out of plane, block, token, head and dim, outermost first. Without a
    `block` axis the token axis holds all blocks one after the other; without a `plane` axis and with two planes each
    plane is a tensor of its own. `strides` are in elements, one per axis; empty means that tensors are passed at each
    submit and bring their own. `window` is in tokens, 0 for full attention. `compress_ratio` is tokens per stored slot.
    """

    num_layers: int
    block_size: int
    heads: int
    head_dim: int
    dtype: str
    planes: int = 2
    axes: tuple[str, ...] = ()
    strides: tuple[int, ...] = ()
    window: int = 0
    compress_ratio: int = 1
    layer_names: tuple[str, ...] = ()

    @property
    def hidden(self) -> int:
        """Elements of one token, one layer, one plane."""
        return self.heads * self.head_dim


class KVLayout(Message, frozen=True):
    """How one instance holds KV: the name of the layout plugin, its layer groups, the number of blocks (0: unknown)."""

    format: str
    groups: tuple[LayerGroup, ...]
    num_blocks: int = 0
    attention_backend: str = ""


class GroupDesc(Message, frozen=True):
    """Shape and dtype of one object of one layer group.

    `form` "canonical" means C-contiguous `[planes, layers, slots, hidden]`; any other name is opaque bytes that only
    the same layout plugin reads.
    """

    shape: tuple[int, ...]
    dtype: str
    form: str = "canonical"
    window: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_bytes(self.dtype)


class MemoryLayoutDesc(Message, frozen=True):
    """What one chunk is, per layer group: the object's shape and dtype. Found by namespace; stored in L2 beside it."""

    chunk_tokens: int
    groups: tuple[GroupDesc, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first group's object (the only one of most models)."""
        return self.groups[0].shape

    @property
    def dtype(self) -> str:
        return self.groups[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one chunk of one rank, all layer groups."""
        return sum(group.nbytes for group in self.groups)


def chunk_tokens_for(block_sizes: Sequence[int], chunk_size: int) -> int:
    """The smallest whole number of blocks of every layer group that is at least `chunk_size` tokens."""
    if not block_sizes or min(block_sizes) < 1 or chunk_size < 1:
        raise BadLayout(f"block sizes {list(block_sizes)} with chunk size {chunk_size}: all must be positive")
    unit = math.lcm(*block_sizes)
    return -(-chunk_size // unit) * unit


def validate_layout(layout: KVLayout) -> None:
    """Raises `BadLayout` or `BadDtype` for a declaration that contradicts itself or describes absurd sizes."""
    if not layout.groups or len(layout.groups) > MAX_GROUPS:
        raise BadLayout(f"{len(layout.groups)} layer groups", available=f"1 to {MAX_GROUPS}", where="layout.groups")
    if layout.num_blocks < 0:
        raise BadLayout(f"num_blocks is {layout.num_blocks}", where="layout.num_blocks", available="0 (unknown) up")
    for index, group in enumerate(layout.groups):
        where = f"layout.groups[{index}]"
        dtype_bytes(group.dtype)
        counts = {
            "num_layers": group.num_layers, "block_size": group.block_size, "heads": group.heads,
            "head_dim": group.head_dim, "compress_ratio": group.compress_ratio,
        }  # fmt: skip
        for name, value in counts.items():
            if not 1 <= value <= 1 << 24:
                raise BadLayout(f"{name} is {value}", where=where, available="1 to 16777216")
        if group.planes not in (1, 2):
            raise BadLayout(f"planes is {group.planes}", where=where, available="2 (K and V) or 1 (one latent plane)")
        if group.window < 0:
            raise BadLayout(f"window is {group.window}", where=where, available="0 (full attention) or more tokens")
        if group.block_size % group.compress_ratio:
            raise BadLayout(
                f"block_size {group.block_size} is no multiple of compress_ratio {group.compress_ratio}", where=where
            )
        unknown = [axis for axis in group.axes if axis not in AXES]
        if unknown or len(set(group.axes)) != len(group.axes):
            raise BadLayout(f"axes are {group.axes}", where=where, available=f"each at most once: {', '.join(AXES)}")
        if group.strides and len(group.strides) != len(group.axes):
            raise BadLayout(f"{len(group.strides)} strides for {len(group.axes)} axes", where=where)
        if group.layer_names and len(group.layer_names) != group.num_layers:
            raise BadLayout(f"{len(group.layer_names)} layer names for {group.num_layers} layers", where=where)


def canonical_desc(layout: KVLayout, chunk_size: int) -> MemoryLayoutDesc:
    """The desc of objects in canonical form, `[planes, layers, chunk_tokens / compress_ratio, hidden]` per group.

    Raises `BadLayout` / `BadDtype` for what `validate_layout` refuses and for objects above 1 GiB.
    """
    validate_layout(layout)
    tokens = chunk_tokens_for([group.block_size for group in layout.groups], chunk_size)
    groups = tuple(
        GroupDesc((g.planes, g.num_layers, tokens // g.compress_ratio, g.hidden), g.dtype, window=g.window)
        for g in layout.groups
    )
    for index, desc in enumerate(groups):
        if desc.nbytes > MAX_OBJECT_BYTES:
            raise BadLayout(
                f"one object would be {desc.nbytes} bytes", where=f"layout.groups[{index}]",
                available=f"at most {MAX_OBJECT_BYTES}", hint="check hidden size and layer count, or lower chunk_size",
            )  # fmt: skip
    return MemoryLayoutDesc(tokens, groups)


class Layout(ABC):
    """A layout plugin: derives the declaration from an engine's tensors and gives views of them block by block.

    `describe` and `block_views` run in engine processes and may import torch; `object_desc` runs on both sides
    and must not.
    """

    name: str

    @abstractmethod
    def describe(self, kv_caches: Mapping[str, LayerTensors], *, block_size: int) -> KVLayout:
        """The declaration for these tensors. `kv_caches` maps layer name to tensors in layer order.

        Never guesses an axis: raises `BadLayout` saying what to declare when shapes leave a doubt. Does not block.
        """

    @abstractmethod
    def block_views(self, layout: KVLayout, kv_caches: Mapping[str, LayerTensors]) -> list[list[list[torch.Tensor]]]:
        """Views, never copies, as `[group][plane][layer]`, each of shape `[blocks, slots per block, heads, head_dim]`
        with any strides, where slots per block = block_size / compress_ratio.

        The views borrow the engine's memory and are valid as long as the passed tensors are. Raises `BadLayout` if the
        tensors do not fit the declaration.
        """

    def object_desc(self, layout: KVLayout, chunk_size: int) -> MemoryLayoutDesc:
        """What one stored object looks like; canonical unless a plugin packs in its own way."""
        return canonical_desc(layout, chunk_size)
