"""Owns the canary's way to a cache: how transformers' attention lays out keys and values. Engine side."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvf_transformers.shapes import LayerPair
from kvframework.api.canary import EngineView
from kvframework.api.layout import KVLayout


class CacheView(EngineView):
    """One scratch block per layer, keys and values each `[1, heads, tokens, dim]`. Borrows the tensors."""

    def __init__(self, pairs: Mapping[str, LayerPair]) -> None:
        self.spare_blocks = ()
        self._pairs = pairs
        self._planes: list[list[tuple[torch.Tensor, ...]]] = []

    def declared(self, layout: KVLayout) -> None:
        self.spare_blocks = (0,) * len(layout.groups)
        self._planes = [
            [self._planes_of(name, group.planes, (group.heads, group.head_dim)) for name in group.layer_names]
            for group in layout.groups
        ]

    def read(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        return self._planes[group][layer][plane][0].transpose(0, 1).clone()

    def write(self, group: int, layer: int, plane: int, block: int, values: torch.Tensor) -> None:
        self._planes[group][layer][plane][0].transpose(0, 1).copy_(values)

    def _planes_of(self, name: str, planes: int, heads_and_dim: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        """Keys and values; of a layer that was split because they differ in shape, the one that is meant."""
        pair = self._pairs[name]
        if planes == len(pair):
            return pair
        return tuple(tensor for tensor in pair if (tensor.shape[1], tensor.shape[3]) == heads_and_dim)
