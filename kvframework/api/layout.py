"""Declarations of KV in an engine's tensors, the objects of a chunk, one per layer group, and the `Layout` contract.

Pure declarations: nothing here imports torch at run time, so a server uses it without torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta
from msgspec.structs import replace

from kvframework.api.plugin import Message, O, Provider, dtype_bytes, hookimpl
from kvframework.api.tensors import MemoryTensor, TensorLike, dtype_name
from kvframework.errors import BadLayout, BadRange

if TYPE_CHECKING:
    import torch

__all__ = [
    "AXES",
    "CANONICAL",
    "MAX_OBJECT_BYTES",
    "MAX_PACKING",
    "NO_BLOCK",
    "OPAQUE",
    "BadLayout",
    "BlockViews",
    "EngineView",
    "GroupDesc",
    "KVLayout",
    "LayerGroup",
    "LayerTensors",
    "Layout",
    "LayoutProvider",
    "MemoryLayoutDesc",
    "MemoryTensor",
    "TensorLike",
    "dtype_name",
    "hookimpl",
    "validate_layout",
]

MAX_CHUNK_TOKENS = 1 << 24
# Bounds of decoded declarations.
MAX_GROUPS = 64
MAX_DIMS = 16
CANONICAL = "canonical"
AXES = ("layer", "plane", "block", "token", "head", "dim")
MAX_OBJECT_BYTES = 1 << 30
# Least bytes of a chunk's largest object, where the model decides the size of chunks.
CHUNK_BYTES = 256 << 10
# The least tokens of such a chunk for each layer group: a prompt of 131,072 tokens on 8 ranks is then no more objects
# than a request may have.
GROUP_TOKENS = 32
MAX_PACKING = 128
# The bound of a decoded declaration.
MAX_LAYERS = 4096
OPAQUE = "opaque:"

# In place of a block id: the engine has freed that block. Only a store of a windowed or state group may contain it,
# for the first chunks of its range, which are then not stored.
NO_BLOCK = 0xFFFFFFFF

# The tensors of one layer: one tensor, or one per plane (K, V).
LayerTensors = TensorLike | Sequence[TensorLike]
# Block views as `[group][plane][layer]`, each `[blocks, slots, heads, head_dim]`.
BlockViews = Sequence[Sequence[Sequence[TensorLike]]]


class GroupDesc(Message, frozen=True):
    """Shape and dtype of one object of one layer group.

    `form` "canonical" means C-contiguous `[planes, layers, slots, hidden]`, the same for every layout of an engine.
    "opaque:<packing>" means `[planes, layers, blocks, bytes of a block]`: each layer's raw blocks, consecutively, for
    engines with the same packing. Any other name is opaque to all but the same layout plugin. `window` is in tokens, 0
    for full attention, 1 for a state."""

    shape: Annotated[tuple[int, ...], Meta(max_length=MAX_DIMS)]
    dtype: str
    form: str = CANONICAL
    window: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_bytes(self.dtype)


class MemoryLayoutDesc(Message, frozen=True):
    """The objects of one chunk, per layer group: shape and dtype. Found by namespace; stored in L2 beside them."""

    chunk_tokens: int
    groups: Annotated[tuple[GroupDesc, ...], Meta(max_length=MAX_GROUPS)]

    @property
    def nbytes(self) -> int:
        """Bytes of one chunk of one rank, all layer groups."""
        return sum(group.nbytes for group in self.groups)


def chunk_tokens_for(block_sizes: Sequence[int], chunk_size: int) -> int:
    """Return the least number of tokens from `chunk_size` on that is whole blocks of all groups. Raises `BadLayout`."""
    if not block_sizes or min(block_sizes) < 1 or chunk_size < 1:
        raise BadLayout(f"block sizes {list(block_sizes)} and chunk size {chunk_size} must all be positive")
    unit = math.lcm(*block_sizes)
    tokens = -(-chunk_size // unit) * unit
    if tokens > MAX_CHUNK_TOKENS:
        fact = f"the smallest chunk of whole blocks of {list(block_sizes)} tokens exceeds {MAX_CHUNK_TOKENS} tokens"
        raise BadLayout(fact, hint="choose block sizes that have a small common multiple")
    return tokens


class LayerGroup(Message, frozen=True):
    """Layers that share block size, shape, dtype and window.

    `axes` names the axes of one layer's tensor, out of layer, plane, block, token, head and dim, outermost first.
    Without a `block` axis the token axis holds all blocks, consecutively; without a `plane` axis and with two
    planes each plane is a separate tensor; with a `layer` axis one tensor holds all layers. `strides` are in
    elements, one per axis; empty means that tensors are passed at each submit and bring their own. `compress_ratio` is
    tokens per stored slot. `num_blocks` is 0 unless this group has another number of blocks than the layout.

    `window` is how many tokens before a position are needed there, 0 for full attention. `state` marks a recurrent
    state: a block holds one slot, the state after its last token, and only the chunk that ends at a hit counts.

    `packing` names the engine's own order inside a block ("" for none). Such blocks are opaque: only whole ones can be
    moved, `heads` is 1, `dtype` is uint8 and `head_dim` the bytes of one block of one layer and plane.
    """

    num_layers: int
    block_size: int
    heads: int
    head_dim: int
    dtype: str
    planes: int = 2
    axes: Annotated[tuple[str, ...], Meta(max_length=MAX_DIMS)] = ()
    strides: Annotated[tuple[int, ...], Meta(max_length=MAX_DIMS)] = ()
    window: int = 0
    compress_ratio: int = 1
    layer_names: Annotated[tuple[str, ...], Meta(max_length=MAX_LAYERS)] = ()
    state: bool = False
    packing: str = ""
    num_blocks: int = 0

    @property
    def hidden(self) -> int:
        """Elements of one slot, one layer, one plane."""
        return self.heads * self.head_dim

    @property
    def slots(self) -> int:
        """Slots of one block: the unit in which blocks are written. A state and an opaque block are one slot."""
        return 1 if self.state or self.packing else self.block_size // self.compress_ratio

    @property
    def slot_tokens(self) -> int:
        """Tokens per slot."""
        return self.block_size // self.slots

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers and planes."""
        return self.planes * self.num_layers * self.slots * self.hidden * dtype_bytes(self.dtype)

    def object_blocks(self, chunk_tokens: int) -> int:
        """Blocks in one chunk's object: all of the chunk, or only the last one of a state."""
        return 1 if self.state else chunk_tokens // self.block_size

    def first_loaded_block(self, tokens: int) -> int:
        """Return the first block that a load of `tokens` tokens writes: the first that the window reaches."""
        return max(tokens - self.window, 0) // self.block_size if self.window else 0


class KVLayout(Message, frozen=True):
    """One instance's KV: the name of the layout plugin, its layer groups, the number of blocks (0: unknown).

    `chunk_tokens` is the chunk of an engine that has digests of its own, or that of `with_chunk`; 0: the server's
    `chunk_size`, in whole blocks."""

    format: str
    groups: Annotated[tuple[LayerGroup, ...], Meta(max_length=MAX_GROUPS)]
    num_blocks: int = 0
    chunk_tokens: int = 0

    def blocks_of(self, group: int) -> int:
        """The number of blocks of a layer group, 0 if unknown."""
        return self.groups[group].num_blocks or self.num_blocks


def validate_layout(layout: KVLayout) -> None:
    """Raise `BadLayout` or `BadDtype` for a declaration that contradicts itself or describes absurd sizes."""
    number, tokens = len(layout.groups), layout.chunk_tokens
    _require(1 <= number <= MAX_GROUPS, f"the layout has {number} layer groups", "layout.groups", f"1 to {MAX_GROUPS}")
    _require(layout.num_blocks >= 0, f"num_blocks is {layout.num_blocks}", "layout.num_blocks", "0 (unknown) or more")
    fact, limits = f"chunk_tokens is {tokens}", f"0 (the server's chunk_size) to {MAX_CHUNK_TOKENS}"
    _require(0 <= tokens <= MAX_CHUNK_TOKENS, fact, "layout.chunk_tokens", limits)
    for index, group in enumerate(layout.groups):
        where = f"layout.groups[{index}]"
        dtype_bytes(group.dtype)
        for name in ("num_layers", "block_size", "heads", "head_dim", "compress_ratio"):
            value = getattr(group, name)
            _require(1 <= value <= 1 << 24, f"{name} is {value}", where, "1 to 16777216")
        size, ratio = group.block_size, group.compress_ratio
        _require(group.planes in (1, 2), f"planes is {group.planes}", where, "2 (K and V) or 1 (one latent plane)")
        _require(tokens % size == 0, f"chunk_tokens {tokens} is not a multiple of block_size {size}", where)
        _require(group.window >= 0, f"window is {group.window}", where, "0 (full attention) or more tokens")
        _require(size % ratio == 0, f"block_size {size} is not a multiple of compress_ratio {ratio}", where)
        both = group.state and group.window
        _require(not both, f"state and window ({group.window} tokens) are both set", where, "state or window")
        _require(
            not group.packing or (group.heads, group.dtype, ratio) == (1, "uint8", 1),
            f"opaque blocks have heads={group.heads}, dtype={group.dtype}, compress_ratio={ratio}",
            where,
            "heads=1, dtype=uint8, compress_ratio=1, and head_dim the bytes of a block",
        )
        characters = len(group.packing)
        _require(characters <= MAX_PACKING, f"packing has {characters} characters", where, str(MAX_PACKING))
        bounded = 0 <= group.num_blocks <= 1 << 32 and all(0 <= stride < 1 << 48 for stride in group.strides)
        _require(
            bounded, f"at most {MAX_PACKING}", where, f"num_blocks is {group.num_blocks}, strides are {group.strides}"
        )
        known = set(group.axes) <= set(AXES) and len(set(group.axes)) == len(group.axes)
        _require(known, f"axes are {group.axes}", where, f"each at most once: {', '.join(AXES)}")
        strides, axes, names = len(group.strides), len(group.axes), len(group.layer_names)
        _require(strides in (0, axes), f"{axes} axes have {strides} strides", where)
        _require(names in (0, group.num_layers), f"{group.num_layers} layers have {names} layer names", where)


def _require(holds: bool, fact: str, where: str, available: str = "") -> None:
    if not holds:
        raise BadLayout(fact, where=where, available=available)


def with_chunk(layout: KVLayout, least: int, most: int) -> KVLayout:
    """Return the declaration with the chunk that its geometry asks for: the smallest of `least` tokens and its doubles
    up to `most` at which the largest object of a rank has `CHUNK_BYTES`, in whole blocks: equal in all engines.

    The declaration stays as it is if it names a chunk, if it has a recurrent state, of which every chunk holds a copy,
    or if `least` is 0: the server names the chunk. Raises `BadLayout` or `BadDtype`."""
    validate_layout(layout)
    if not least or layout.chunk_tokens or any(group.state for group in layout.groups):
        return layout
    tokens = least
    while 2 * tokens <= most and (
        tokens < GROUP_TOKENS * len(layout.groups)
        or max(group.block_bytes * tokens // group.block_size for group in layout.groups) < CHUNK_BYTES
    ):
        tokens *= 2
    return replace(layout, chunk_tokens=chunk_tokens_for([g.block_size for g in layout.groups], tokens))


def canonical_desc(layout: KVLayout, chunk_size: int) -> MemoryLayoutDesc:
    """Return the desc of objects in canonical form, `[planes, layers, chunk_tokens / compress_ratio, hidden]` per
    group; of groups with a packing in opaque form; of a state one slot. Raises as `validate_layout` does, and
    `BadLayout` for objects above 1 GiB."""
    validate_layout(layout)
    tokens = chunk_tokens_for([group.block_size for group in layout.groups], layout.chunk_tokens or chunk_size)
    groups = tuple(
        GroupDesc(
            (g.planes, g.num_layers, g.object_blocks(tokens) * g.slots, g.hidden),
            g.dtype,
            form=OPAQUE + g.packing if g.packing else CANONICAL,
            window=1 if g.state else g.window,
        )
        for g in layout.groups
    )
    for index, desc in enumerate(groups):
        if desc.nbytes > MAX_OBJECT_BYTES:
            fact = f"one object of this layout would have {desc.nbytes} bytes"
            hint = "check the layout's hidden size and layer count, or lower chunk_size"
            raise BadLayout(
                fact, where=f"layout.groups[{index}]", available=f"at most {MAX_OBJECT_BYTES} bytes", hint=hint
            )
    return MemoryLayoutDesc(tokens, groups)


def check_skip(layout: KVLayout, skip_first_n_tokens: int) -> None:
    """Raise `BadRange` if a load that skips `tokens` tokens would have to begin inside an opaque block."""
    for index, group in enumerate(layout.groups):
        if group.packing and not group.state and skip_first_n_tokens % group.block_size:
            fact = f"skip_first_n_tokens is {skip_first_n_tokens}, but layer group {index} has opaque blocks"
            available = f"multiples of its block size, {group.block_size}"
            raise BadRange(fact, where="skip_first_n_tokens", available=available, hint="round down to whole blocks")


class Layout(ABC):
    """A layout plugin: declares an engine's tensors and gives views of them block by block. `describe` and
    `block_views` run in engine processes, which may have no torch; `object_desc` runs on both sides."""

    name: str

    @abstractmethod
    def describe(self, kv_caches: Mapping[str, LayerTensors], *, block_size: int) -> KVLayout:
        """Return the declaration for these tensors. `kv_caches` maps layer name to tensors in layer order. Guesses no
        axis: raises `BadLayout`, which names the missing declaration, for ambiguous shapes. Never blocks."""

    @abstractmethod
    def block_views(self, layout: KVLayout, kv_caches: Mapping[str, LayerTensors]) -> BlockViews:
        """Return views, never copies, as `[group][plane][layer]`, each of shape `[blocks, LayerGroup.slots, heads,
        head_dim]` with any strides. They borrow the engine's memory and stay valid as long as the passed tensors.
        Raises `BadLayout` if the tensors do not fit the declaration."""

    def object_desc(self, layout: KVLayout, chunk_size: int) -> MemoryLayoutDesc:
        """Return the form of one stored object: canonical, or opaque for groups that declare a packing."""
        return canonical_desc(layout, chunk_size)


@dataclass(frozen=True, kw_only=True)
class LayoutProvider(Provider[O]):
    """A layout. `create` makes it: in engines with the engine's options, in servers with those of the TOML."""

    kind = "layout"
    create: Callable[[O], Layout]


class EngineView(ABC):
    """An engine's own access to its KV memory, against which a declared layout is checked at registration: it reads and
    writes as the engine's attention does, without the declaration.

    `spare_blocks` holds a block id per layer group. At the first registration nothing else may use these blocks; after
    a reconnect they are only read. Layer groups and layers count in the order of the declaration; `plane` 0 is K (or
    the one latent plane), 1 is V. Values are tensors of torch, also where the engine's own are not: the check compares
    dtypes that Python has no numbers for."""

    spare_blocks: Sequence[int]

    def declared(self, layout: KVLayout) -> None:
        """Receive the declaration, once and before any read or write: it gives the layers of each group. Optional."""
        return

    @abstractmethod
    def read(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        """Return a copy of the block, `[slots per block, heads, head_dim]`, in the engine's dtype."""

    @abstractmethod
    def write(self, group: int, layer: int, plane: int, block: int, values: torch.Tensor) -> None:
        """Write `values`, in the shape that `read` returns, into the block. Bit-exact for all values."""
