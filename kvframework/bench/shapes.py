"""Owns the shapes of KV that stores are measured with, and what each is meant to reach. Pure."""

from __future__ import annotations

import msgspec

from kvframework.api import dtype_bytes

BLOCK_TOKENS = 16


class Shape(msgspec.Struct, frozen=True):
    """One model's KV and the tokens of one request. `reach` is the share of `copy` that it is meant to reach."""

    name: str
    layers: int
    heads: int
    head_dim: int
    tokens: int
    reach: float
    repetitions: int
    dtype: str = "bfloat16"

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.heads * self.head_dim * dtype_bytes(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.tokens * self.bytes_per_token

    @property
    def blocks(self) -> int:
        return self.tokens // BLOCK_TOKENS

    @property
    def summary(self) -> str:
        return f"{self.layers} layers, {self.heads} heads x {self.head_dim}, {self.dtype}, block {BLOCK_TOKENS}"

    def quick(self) -> Shape:
        """The same with two chunks of tokens, to see that it works."""
        return msgspec.structs.replace(self, tokens=512, repetitions=2)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3-8b", layers=32, heads=8, head_dim=128, tokens=2048, reach=0.85, repetitions=20),
        Shape("12kb", layers=24, heads=2, head_dim=64, tokens=8192, reach=0.6, repetitions=40),
        Shape("1kb", layers=4, heads=1, head_dim=64, tokens=2048, reach=0.3, repetitions=200),
    )
}
