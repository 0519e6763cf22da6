"""Owns the shapes of KV that `bench cuda` moves: models, and where engines put their axes. Pure."""

from __future__ import annotations

import math

import msgspec

from kvframework.api import dtype_bytes

CHUNK_TOKENS = 256


class CudaShape(msgspec.Struct, frozen=True):
    """One model's KV in one layout: a tensor a layer, whose `axes` are outermost first. Without a plane axis there is
    one plane, without a head axis one head (MLA)."""

    name: str
    layers: int
    axes: tuple[str, ...]
    head_dim: int
    heads: int = 1
    block_tokens: int = 16
    dtype: str = "bfloat16"

    def with_block(self, tokens: int) -> CudaShape:
        """The same with blocks of so many tokens."""
        return msgspec.structs.replace(self, block_tokens=tokens)

    def dims(self, blocks: int) -> tuple[int, ...]:
        """Of one layer's tensor."""
        return tuple(self._sizes(blocks)[axis] for axis in self.axes)

    def tensor_bytes(self, blocks: int) -> int:
        return math.prod(self.dims(blocks)) * dtype_bytes(self.dtype)

    def blocks(self, chunks: int) -> int:
        return chunks * CHUNK_TOKENS // self.block_tokens

    def nbytes(self, chunks: int) -> int:
        """Of a request of so many chunks."""
        return self.layers * self.tensor_bytes(self.blocks(chunks))

    @property
    def piece_bytes(self) -> int:
        """Of a block, what lies together: all of it, or what it has of one plane."""
        inner = self.axes[self.axes.index("block") + 1 :]
        return math.prod(self._sizes(1)[axis] for axis in inner) * dtype_bytes(self.dtype)

    @property
    def fragment_bytes(self) -> int:
        """What lies together both here and in a stored object, where a token's heads do."""
        sizes = self._sizes(1)
        together = ["dim"] if self.axes[-2:] == ("token", "dim") and "head" in self.axes else ["token", "head", "dim"]
        return math.prod(sizes[axis] for axis in together) * dtype_bytes(self.dtype)

    def _sizes(self, blocks: int) -> dict[str, int]:
        return {
            "plane": 2,
            "block": blocks,
            "token": self.block_tokens,
            "head": self.heads,
            "dim": self.head_dim,
        }


SHAPES = {
    shape.name: shape
    for shape in (
        CudaShape("llama-3-8b, plane first", 32, ("plane", "block", "token", "head", "dim"), 128, heads=8),
        CudaShape("llama-3-8b, block first", 32, ("block", "plane", "token", "head", "dim"), 128, heads=8),
        CudaShape("llama-3-8b, heads first", 32, ("block", "plane", "head", "token", "dim"), 128, heads=8),
        CudaShape("deepseek-v3", 61, ("block", "token", "dim"), 576),
    )
}


def fragment_shape(fragment_bytes: int, nbytes: int) -> tuple[CudaShape, int]:
    """A shape whose fragments have so many bytes, a power of two from 256 on, and the chunks that make about `nbytes`
    of it: as many layers as models have, or fewer where a single chunk would be more."""
    blocks = CHUNK_TOKENS // 16
    layers = max(min(64, nbytes // (blocks * fragment_bytes)), 1)
    dim = fragment_bytes // (16 * dtype_bytes("bfloat16"))
    shape = CudaShape(f"fragments of {fragment_bytes} bytes", layers, ("block", "token", "dim"), dim)
    return shape, max(nbytes // shape.nbytes(1), 1)
