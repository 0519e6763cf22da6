"""Owns an engine's paged KV memory as a bench needs it: blocks to store, blocks to load into, and their comparison.

Imports torch; for the process that plays the engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from kvframework.bench.errors import WrongBytes
from kvframework.bench.shapes import BLOCK_TOKENS, Shape

AXES = ("plane", "block", "token", "head", "dim")
_POISON = 0xA5


class PagedMemory:
    """One tensor a layer, `[plane, block, token, head, dim]`, with `source` and `target` blocks of one request each.

    All of it is random and so touched. `shuffled` blocks lie anywhere, as after a while in an engine; else each
    request's blocks are neighbours.
    """

    def __init__(self, shape: Shape, *, shuffled: bool, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, shape.dtype)
        dims = (2, 2 * shape.blocks, BLOCK_TOKENS, shape.heads, shape.head_dim)
        self.kv: dict[str, torch.Tensor] = {}
        for layer in range(shape.layers):
            words = torch.empty(shape.nbytes * 2 // shape.layers // 8, dtype=torch.int64)
            self.kv[f"layers.{layer}"] = words.random_(generator=generator).view(dtype).view(dims)
        ids = list(range(2 * shape.blocks))
        if shuffled:
            random.Random(seed).shuffle(ids)  # noqa: S311
        self.source, self.target = ids[: shape.blocks], ids[shape.blocks :]

    def poison(self) -> None:
        """Fills the target with one byte over and over, so that what is not loaded is seen."""
        for kv in self.kv.values():
            _bytes(kv)[:, self.target] = _POISON

    def verify(self) -> None:
        """Raises `WrongBytes`, naming the first place, unless the target equals the source byte for byte."""
        for name, kv in self.kv.items():
            data = _bytes(kv)
            wrong = (data[:, self.source] != data[:, self.target]).nonzero()
            if len(wrong):
                plane, block, token = wrong[0].tolist()[:3]
                raise WrongBytes(
                    f"{len(wrong)} bytes of {name} are not what was stored",
                    where=f"plane {plane}, token {block * BLOCK_TOKENS + token}",
                    hint="this is a bug of the transport; no figures are reported",
                )


def _bytes(kv: torch.Tensor) -> torch.Tensor:
    # NaNs are unequal to themselves; bytes are not.
    return kv.view(torch.uint8)


def block_ids(blocks: Sequence[int]) -> list[list[int]]:
    """Of the one layer group."""
    return [list(blocks)]
