"""The canary's access to a cache: the order in which transformers' attention reads keys and values. Engine side."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvframework.api.canary import EngineView
from kvframework.api.layout import KVLayout, LayerTensors


class CacheView(EngineView):
    """One scratch block per layer, keys and values each `[1, heads, tokens, dim]`, or a state `[1, elements]`. Borrows
    the tensors."""

    def __init__(self, tensors: Mapping[str, LayerTensors]) -> None:
        self.spare_blocks = ()
        self._tensors = tensors
        self._planes: list[list[tuple[torch.Tensor, ...]]] = []

    def declared(self, layout: KVLayout) -> None:
        self.spare_blocks = (0,) * len(layout.groups)
        self._planes = [
            [self._planes_of(name, group.planes, (group.heads, group.head_dim)) for name in group.layer_names]
            for group in layout.groups
        ]

    def read(self, group: int, layer: int, plane: int, block: int) -> torch.Tensor:
        return self._slots(group, layer, plane).clone()

    def write(self, group: int, layer: int, plane: int, block: int, values: torch.Tensor) -> None:
        self._slots(group, layer, plane).copy_(values)

    def _slots(self, group: int, layer: int, plane: int) -> torch.Tensor:
        """`[tokens, heads, dim]`, of a state `[1, 1, elements]`."""
        tensor = self._planes[group][layer][plane]
        return tensor[None] if tensor.dim() == 2 else tensor[0].transpose(0, 1)

    def _planes_of(self, name: str, planes: int, heads_and_dim: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        """Return a state, or keys and values; of a layer that was split because they differ in shape, only the one with
        this shape."""
        pair = self._tensors[name]
        if isinstance(pair, torch.Tensor):
            return (pair,)
        if planes == len(pair):
            return tuple(pair)
        return tuple(tensor for tensor in pair if (tensor.shape[1], tensor.shape[3]) == heads_and_dim)
