"""Owns how much `kvframework bench cuda` measures, and what is meant to be reached. Pure."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from kvframework.bench.cuda.shapes import SHAPES, CudaShape

# Of the speed of one plain pinned copy.
REACH = 0.9
SUBMIT_US = 200.0

ENGINES = ("auto", "dma", "kernel")
BLOCKS = (16, 64)

_RESERVE = 1 << 30


class Sizes(msgspec.Struct, frozen=True):
    """`chunks` are the steps of a shape, ascending. A step has at most `rounds` rounds, fewer (but three) if they would
    take longer than `row_s`, and is left out if one store would take longer than `patience_s`. `submits` are for each
    step and direction. The loop of `matmul` multiplies matrices of `matmul_size` for `loop_s`, beside transfers of
    `matmul_chunks`. The sweep moves about `sweep_bytes` in fragments of each of `sweep_fragments`."""

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
    loop_s: float = 0.2
    sweep_bytes: int = 64 << 20
    sweep_fragments: tuple[int, ...] = tuple(1 << power for power in range(8, 20))
    reserve: int = _RESERVE

    def only(self, *, shapes: Collection[str], blocks: Collection[int], engines: Collection[str]) -> Sizes:
        """What of these was named; nothing named is all. A shape is named by how it begins."""
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
        """The steps that fit into what is free. On the GPU a request is there twice and each of two plain copies has
        its memory; so it is on the host, in L1 and in pinned memory. `reserve` is for contexts and processes."""
        free = min(device_free, host_free) - self.reserve
        return tuple(chunks for chunks in self.chunks if 4 * shape.nbytes(chunks) <= free)

    def rounds_of(self, store_s: float) -> int:
        """How many rounds a step has whose store takes so long. A round is six transfers or copies, and stores between
        them that are not measured."""
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
    loop_s=0.01,
    sweep_bytes=4 << 20,
    sweep_fragments=(1 << 10, 32 << 10, 256 << 10),
)
