"""The layout `dynamic_cache`: the tensors of transformers' `DynamicCache`. Engine side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvf_layouts.axes import block_view
from kvf_layouts.declaring import declare
from kvf_layouts.grouping import SeenLayer, TensorGroup, group_layers, plane_tensors, same_size, views_of
from kvf_layouts.rules import GroupRule
from kvframework.api.layout import KVLayout, LayerTensors, Layout
from kvframework.errors import BadLayout

if TYPE_CHECKING:
    import torch

AXES = ("head", "token", "dim")


class DynamicCacheLayout(Layout):
    """Each layer is a pair (keys, values), each `[batch = 1, heads, tokens, dim]`; blocks follow each other on the
    token axis, and tokens behind the last whole block are left out.

    Such caches grow and are passed at each submit: the declaration has no strides and no number of blocks. The declared
    axes leave the batch axis out. Keys and values of unequal head size become two groups of one plane. Stateless,
    thread-safe.
    """

    name = "dynamic_cache"

    def describe(self, kv_caches: Mapping[str, LayerTensors], *, block_size: int) -> KVLayout:
        """See `Layout.describe`."""
        if block_size < 1:
            raise BadLayout(f"block_size is {block_size}", available="1 or more tokens")
        groups = _groups(kv_caches, block_size)
        return declare(self.name, groups, (GroupRule(),), block_size, lambda _rule: AXES, stable=False)

    def block_views(self, layout: KVLayout, kv_caches: Mapping[str, LayerTensors]) -> list[list[list[torch.Tensor]]]:
        """See `Layout.block_views`. All layers must hold the same number of tokens."""
        return views_of(layout, _groups(kv_caches, layout.groups[0].block_size))


def _groups(kv_caches: Mapping[str, LayerTensors], block_size: int) -> list[TensorGroup]:
    if not kv_caches:
        raise BadLayout("there are no layers", available="layer name -> (keys, values), in layer order")
    layers = {name: _pair(name, tensors) for name, tensors in kv_caches.items()}
    same_size(
        {f"{name}[{index}]": tensor.shape[1] for name, pair in layers.items() for index, tensor in enumerate(pair)},
        "the number of tokens",
    )
    return group_layers(
        SeenLayer(name, [block_view(tensor, AXES, block_size) for tensor in pair]) for name, pair in layers.items()
    )


def _pair(name: str, tensors: LayerTensors) -> Sequence[torch.Tensor]:
    """Keys and values without their batch axis, as views."""
    pair = plane_tensors(name, tensors)
    if len(pair) != 2 or any(tensor.dim() != 4 or tensor.shape[0] != 1 for tensor in pair):
        raise BadLayout(
            f"{len(pair)} tensors of shape {', '.join(str(tuple(tensor.shape)) for tensor in pair)}",
            where=f"layer {name}",
            available="a pair (keys, values), each [1, heads, tokens, dim]",
            hint="a batch of one request; save requests of a batch one by one",
        )
    return [tensor.select(0, 0) for tensor in pair]
