"""The shapes of KV that `bench cuda` moves, and its sizes and targets. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from kvframework.api.plugin import dtype_bytes

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
        """Return the same shape with blocks of `tokens` tokens."""
        return msgspec.structs.replace(self, block_tokens=tokens)

    def dims(self, blocks: int) -> tuple[int, ...]:
        """Return the dimensions of one layer's tensor."""
        return tuple(self._sizes(blocks)[axis] for axis in self.axes)

    def tensor_bytes(self, blocks: int) -> int:
        return math.prod(self.dims(blocks)) * dtype_bytes(self.dtype)

    def blocks(self, chunks: int) -> int:
        return chunks * CHUNK_TOKENS // self.block_tokens

    def nbytes(self, chunks: int) -> int:
        """Return the bytes of a request of `chunks` chunks."""
        return self.layers * self.tensor_bytes(self.blocks(chunks))

    @property
    def piece_bytes(self) -> int:
        """The contiguous bytes of a block: all of it, or one plane of it."""
        inner = self.axes[self.axes.index("block") + 1 :]
        return math.prod(self._sizes(1)[axis] for axis in inner) * dtype_bytes(self.dtype)

    @property
    def fragment_bytes(self) -> int:
        """The bytes that are contiguous both here and in a stored object, where a token's heads are contiguous."""
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


# The target, as a share of the speed of one plain pinned copy.
TARGET_RATIO = 0.9
SUBMIT_US = 200.0

ENGINES = ("auto", "dma", "kernel")
BLOCKS = (16, 64)

_RESERVE = 1 << 30


class Sizes(msgspec.Struct, frozen=True):
    """`chunks` are the steps of a shape, ascending. A step has at most `rounds` rounds, fewer (but three) if they would
    take longer than `row_s`, and is left out if one store would take longer than `patience_s`. `submits` are for each
    step and direction. The loop of `matmul` multiplies matrices of `matmul_size` for `loop_s`, next to transfers of
    `matmul_chunks`; the steps of `decode` read `step_bytes`, next to as many. The sweep moves about `sweep_bytes` in
    fragments of each of `sweep_fragments`."""

    shapes: tuple[CudaShape, ...] = tuple(shape.with_block(tokens) for shape in SHAPES.values() for tokens in BLOCKS)
    engines: tuple[str, ...] = ENGINES
    chunks: tuple[int, ...] = (1, 4, 16, 64)
    rounds: int = 20
    row_s: float = 3.0
    patience_s: float = 2.0
    submits: int = 200
    matmul_size: int = 8192
    matmul_chunks: int = 16
    matmul_rounds: int = 10
    step_bytes: int = 4 << 30
    loop_s: float = 0.2
    sweep_bytes: int = 64 << 20
    sweep_fragments: tuple[int, ...] = tuple(1 << power for power in range(8, 20))
    reserve: int = _RESERVE

    def only(self, *, shapes: Collection[str], blocks: Collection[int], engines: Collection[str]) -> Sizes:
        """Return the sizes limited to the named ones; no name selects all. A name selects every shape that begins with
        it."""
        return msgspec.structs.replace(
            self,
            shapes=tuple(
                shape
                for shape in self.shapes
                if (not shapes or shape.name.startswith(tuple(shapes))) and (not blocks or shape.block_tokens in blocks)
            ),
            engines=tuple(engine for engine in self.engines if not engines or engine in engines),
        )

    def fitting(self, shape: CudaShape, *, device_free: int, host_free: int) -> tuple[int, ...]:
        """Return the steps that fit into the free memory. On the GPU a request is there twice and each of two plain
        copies has its memory; so it is on the host, in L1 and in pinned memory. `reserve` is for contexts and
        processes."""
        free = min(device_free, host_free) - self.reserve
        return tuple(chunks for chunks in self.chunks if 4 * shape.nbytes(chunks) <= free)

    def rounds_of(self, store_s: float) -> int:
        """Return the number of rounds of a step whose store takes `store_s`. A round is six transfers or copies, and
        stores between them that are not measured."""
        return max(min(int(self.row_s / (8 * store_s)), self.rounds), min(self.rounds, 3))


FULL = Sizes()
QUICK = Sizes(
    shapes=tuple(SHAPES.values()),
    chunks=(1, 2),
    rounds=2,
    submits=10,
    matmul_size=1024,
    matmul_chunks=1,
    matmul_rounds=2,
    step_bytes=64 << 20,
    loop_s=0.01,
    sweep_bytes=4 << 20,
    sweep_fragments=(1 << 10, 32 << 10, 256 << 10),
)
