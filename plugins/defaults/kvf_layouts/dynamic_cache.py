"""The layout `dynamic_cache`: keys, values and recurrent states of transformers' caches. Engine side."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from kvf_layouts.declaring import (
    GroupRule,
    SeenLayer,
    TensorGroup,
    check_given,
    declare,
    group_layers,
    plane_tensors,
    same_size,
    views_of,
)
from kvf_layouts.tensors import block_view
from kvframework.api.layout import BlockViews, KVLayout, LayerTensors, Layout, TensorLike
from kvframework.errors import BadLayout

AXES = ("head", "token", "dim")
STATE_AXES = ("block", "dim")
_RULES = (GroupRule(), GroupRule(state=True))


class DynamicCacheLayout(Layout):
    """Each layer is a pair (keys, values), each `[batch = 1, heads, tokens, dim]`; blocks follow each other on the
    token axis, and tokens behind the last whole block are left out. A layer whose name matches one of `states` is one
    tensor `[blocks, elements]` instead: a block is a recurrent state, that after the block's last token.

    Such caches grow and are passed at each submit: the declaration has no strides and no number of blocks. The declared
    axes leave the batch axis out. Keys and values of unequal head size become two groups of one plane; states are
    grouped by size and dtype, behind all keys and values. Stateless, thread-safe.
    """

    name = "dynamic_cache"

    def __init__(self, states: Sequence[str] = ()) -> None:
        self._states = tuple(states)

    def describe(self, kv_caches: Mapping[str, LayerTensors], *, block_size: int) -> KVLayout:
        """See `Layout.describe`."""
        check_given(kv_caches, block_size)
        for pattern in self._states:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in kv_caches):
                raise BadLayout(
                    f"no layer is named {pattern}",
                    where="layout.dynamic_cache.states",
                    available=", ".join(list(kv_caches)[:8]),
                )
        groups = self._groups(kv_caches, block_size)
        return declare(
            self.name, groups, _RULES, block_size, lambda rule: STATE_AXES if rule.state else AXES, stable=False
        )

    def block_views(self, layout: KVLayout, kv_caches: Mapping[str, LayerTensors]) -> BlockViews:
        """See `Layout.block_views`. All layers with keys and values must hold the same number of tokens."""
        return views_of(layout, self._groups(kv_caches, layout.groups[0].block_size))

    def _groups(self, kv_caches: Mapping[str, LayerTensors], block_size: int) -> list[TensorGroup]:
        pairs, states = {}, {}
        for name, tensors in kv_caches.items():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._states):
                states[name] = _state(name, tensors)
            else:
                pairs[name] = _pair(name, tensors)
        if pairs:
            same_size(
                {f"{name}[{at}]": tensor.shape[1] for name, pair in pairs.items() for at, tensor in enumerate(pair)},
                "the number of tokens",
            )
        seen = [
            SeenLayer(name, [block_view(tensor, AXES, block_size) for tensor in pair]) for name, pair in pairs.items()
        ]
        seen += [SeenLayer(name, [block_view(tensor, STATE_AXES, 1)], rule=1) for name, tensor in states.items()]
        return group_layers(seen)


def _pair(name: str, tensors: LayerTensors) -> Sequence[TensorLike]:
    """Keys and values without their batch axis, as views."""
    pair = plane_tensors(name, tensors)
    if len(pair) != 2 or any(len(tensor.shape) != 4 or tensor.shape[0] != 1 for tensor in pair):
        raise BadLayout(
            f"the layer has {len(pair)} tensors of shape {', '.join(str(tuple(tensor.shape)) for tensor in pair)}",
            where=f"layer {name}",
            available="a pair (keys, values), each [1, heads, tokens, dim]",
            hint="save each request of a batch separately",
        )
    return [tensor.select(0, 0) for tensor in pair]


def _state(name: str, tensors: LayerTensors) -> TensorLike:
    planes = plane_tensors(name, tensors)
    if len(planes) != 1 or len(planes[0].shape) != 2:
        raise BadLayout(
            f"the layer has {len(planes)} tensors of shape {', '.join(str(tuple(tensor.shape)) for tensor in planes)}",
            where=f"layer {name}",
            available="one state tensor [blocks, elements]",
        )
    return planes[0]
