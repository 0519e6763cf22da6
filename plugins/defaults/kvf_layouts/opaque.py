"""The layout `opaque`: blocks in an order of the engine's own, moved as raw bytes. Engine side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from kvf_layouts.declaring import (
    OpaqueRule,
    SeenLayer,
    check_given,
    declare,
    group_layers,
    plane_tensors,
    rules_of_layers,
    views_of,
)
from kvf_layouts.tensors import block_view, check_apart
from kvframework.api.layout import BlockViews, KVLayout, LayerTensors, Layout, MemoryTensor, TensorLike
from kvframework.errors import BadLayout

if TYPE_CHECKING:
    import torch

AXES = ("block", "dim")


class OpaqueLayout(Layout):
    """One tensor per layer, or a pair, whose axis `block_axis` counts blocks; the contents of a block, in memory order,
    belong to the engine, as for KV that is packed for an instruction set.

    An object is the raw bytes of the blocks, layer by layer. `packing` names everything that two engines must share to
    read each other's blocks; it is part of the namespace. Only whole blocks move. Stateless, thread-safe.
    """

    name = "opaque"

    def __init__(
        self, packing: str = "", block_axis: int | None = None, rules: Sequence[OpaqueRule] = (), chunk_tokens: int = 0
    ) -> None:
        self._packing = packing
        self._block_axis = block_axis
        self._rules = tuple(rules)
        self._chunk_tokens = chunk_tokens

    def describe(self, kv_caches: Mapping[str, LayerTensors], *, block_size: int) -> KVLayout:
        """See `Layout.describe`. Raises `BadLayout` naming the layer and a declaration that would work."""
        check_given(kv_caches, block_size)
        if not self._packing:
            raise BadLayout(
                "the packing of the blocks is not declared",
                where="layout.opaque.packing",
                available='a text that names the order of bytes, such as "cpu-amx/bfloat16/hnd/128x64"',
                hint="name everything that must be equal for another engine to read these blocks",
            )
        rules = self._rules or (OpaqueRule(),)
        chosen = rules_of_layers(self._rules, kv_caches)
        for index in range(len(rules)):
            check_apart(
                {
                    f"{name}[{at}]": tensor
                    for name in kv_caches
                    if chosen[name] == index
                    for at, tensor in enumerate(plane_tensors(name, kv_caches[name]))
                }
            )
        return declare(
            self.name,
            group_layers(self._see(kv_caches, chosen)),
            rules,
            block_size,
            lambda _rule: AXES,
            packing=self._packing,
            chunk_tokens=self._chunk_tokens,
        )

    def block_views(self, layout: KVLayout, kv_caches: Mapping[str, LayerTensors]) -> BlockViews:
        """See `Layout.block_views`: `[blocks, 1, 1, bytes of a block]`."""
        return views_of(layout, group_layers(self._see(kv_caches, rules_of_layers(self._rules, kv_caches))))

    def _see(self, kv_caches: Mapping[str, LayerTensors], chosen: Mapping[str, int]) -> list[SeenLayer]:
        seen = []
        for name, tensors in kv_caches.items():
            axis = self._rules[chosen[name]].block_axis if self._rules else None
            axis = self._block_axis if axis is None else axis
            blocks = [_blocks(name, tensor, axis) for tensor in plane_tensors(name, tensors)]
            strides = {tuple(view.stride()) for view in blocks}
            views = [block_view(view, AXES, 1) for view in blocks]
            seen.append(SeenLayer(name, views, chosen[name], strides.pop() if len(strides) == 1 else ()))
        return seen


def _blocks(name: str, tensor: TensorLike, block_axis: int | None) -> TensorLike:
    """The tensor as bytes `[blocks, bytes of a block]`, a view. Raises `BadLayout`."""
    where = f"layer {name}"
    if block_axis is None or not 0 <= block_axis < len(tensor.shape):
        raise BadLayout(
            f"the block axis of shape {tuple(tensor.shape)} is "
            + ("not declared" if block_axis is None else f"{block_axis}"),
            where=where,
            available=f"0 to {len(tensor.shape) - 1}",
            hint="set the layout's option `block_axis`, which is never guessed from sizes",
        )
    # Memory order: the axes inside a block by falling stride.
    inner = [axis for axis in range(len(tensor.shape)) if axis != block_axis and tensor.shape[axis] > 1]
    strides = tensor.stride()
    inner.sort(key=strides.__getitem__, reverse=True)
    dense = 1
    for axis in reversed(inner):
        if strides[axis] != dense:
            raise BadLayout(
                f"the bytes of a block are not contiguous: shape {tuple(tensor.shape)}, strides {strides}",
                where=where,
                available="blocks without gaps",
                hint="pass keys and values as a pair if they are separate",
            )
        dense *= tensor.shape[axis]
    elements = tensor.as_strided((tensor.shape[block_axis], dense), (strides[block_axis], 1))
    if isinstance(elements, MemoryTensor):
        return elements.view("uint8")
    import torch

    return cast("torch.Tensor", elements).view(torch.uint8)
