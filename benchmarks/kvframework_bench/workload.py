"""The shapes of KV for stores, their targets, and the choice of the transfer path."""

from __future__ import annotations

import enum

import msgspec

from kvframework.api.plugin import dtype_bytes
from kvframework.registry.registry import PluginRegistry
from kvframework_bench.errors import BenchUnavailable

BLOCK_TOKENS = 16


class Shape(msgspec.Struct, frozen=True):
    """One model's KV and the tokens of one request. `target_ratio` is the target share of `copy`."""

    name: str
    layers: int
    heads: int
    head_dim: int
    tokens: int
    target_ratio: float
    rounds: int
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
        return msgspec.structs.replace(self, tokens=512, rounds=2)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3-8b", layers=32, heads=8, head_dim=128, tokens=2048, target_ratio=0.85, rounds=20),
        Shape("12kb", layers=24, heads=2, head_dim=64, tokens=8192, target_ratio=0.6, rounds=40),
        Shape("1kb", layers=4, heads=1, head_dim=64, tokens=2048, target_ratio=0.3, rounds=200),
    )
}


TRANSPORT = "cpu_gather"
_OPTION = "path"


class TransferPath(str, enum.Enum):
    arena = "arena"
    wire = "wire"


def transport_options(path: TransferPath, plugins: PluginRegistry) -> dict[str, object]:
    """Return the options with which the transport takes `path`. Raises `BenchUnavailable` if it has no choice and takes
    another one."""
    provider = plugins.resolve("transport", TRANSPORT, where="bench store")
    if _OPTION in provider.options.__struct_fields__:
        return {_OPTION: path.value}
    if path is TransferPath.arena:
        return {}
    raise BenchUnavailable(
        f"this server has no {path.value} path",
        where=f"transport {TRANSPORT}",
        available=TransferPath.arena.value,
        hint="bench --path arena",
    )
