"""A chunk of a namespace: how many tokens it has, and its objects, one per layer group. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from kvframework.api.plugin import Message
from kvframework.api.sizes import dtype_bytes
from kvframework.errors import BadLayout

MAX_CHUNK_TOKENS = 1 << 24
# Bounds of decoded declarations.
MAX_GROUPS = 64
MAX_DIMS = 16
CANONICAL = "canonical"


class GroupDesc(Message, frozen=True):
    """Shape and dtype of one object of one layer group.

    `form` "canonical" means C-contiguous `[planes, layers, slots, hidden]`, the same for every layout of an engine.
    "opaque:<packing>" means `[planes, layers, blocks, bytes of a block]`: each layer's raw blocks, consecutively, for
    engines with the same packing. Any other name is opaque to all but the same layout plugin. `window` is in tokens, 0
    for full attention, 1 for a state.
    """

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
    """Return the smallest number of tokens, at least `chunk_size`, that is whole blocks of every layer group. Raises
    `BadLayout`."""
    if not block_sizes or min(block_sizes) < 1 or chunk_size < 1:
        raise BadLayout(f"block sizes {list(block_sizes)} with chunk size {chunk_size}: all must be positive")
    unit = math.lcm(*block_sizes)
    tokens = -(-chunk_size // unit) * unit
    if tokens > MAX_CHUNK_TOKENS:
        fact = f"a chunk of whole blocks of all of {list(block_sizes)} tokens has more than {MAX_CHUNK_TOKENS}"
        raise BadLayout(fact, hint="choose block sizes that have a small common multiple")
    return tokens
