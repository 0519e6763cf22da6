"""The layout `paged`: KV in blocks of a block table, as vLLM, SGLang and most engines hold it. Engine side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvf_layouts.declaring import (
    PagedRule,
    SeenLayer,
    check_given,
    declare,
    group_layers,
    plane_tensors,
    rules_of_layers,
    same_size,
    views_of,
)
from kvf_layouts.tensors import block_view, check_apart, check_axes, check_sizes, unbind, undeclared
from kvframework.api.layout import BlockViews, KVLayout, LayerTensors, Layout, TensorLike
from kvframework.errors import BadLayout


class PagedLayout(Layout):
    """One tensor per layer, with or without a plane axis, a pair of tensors per layer (keys, values), or one tensor
    for all layers (with a layer axis).

    `axes` declares the axes of each tensor, outermost first; nothing is guessed from sizes. Without `block` the token
    axis holds all blocks one after the other; without `head` there is one head (MLA); with one tensor and no `plane`
    there is one plane. `rules` declare layer groups; without them layers of equal shape and dtype form one.
    `chunk_tokens` as in `KVLayout`. Stateless, thread-safe.
    """

    name = "paged"

    def __init__(self, axes: Sequence[str] = (), rules: Sequence[PagedRule] = (), chunk_tokens: int = 0) -> None:
        """Raise `BadLayout` for contradictory axes; an instance that describes nothing needs no axes."""
        self._chunk_tokens = chunk_tokens
        self._axes = tuple(axes)
        self._rules = tuple(rules)
        for rule in self._rules or (PagedRule(),):
            axes = rule.axes or self._axes
            if axes:
                check_axes(axes, state=rule.state)

    def describe(self, kv_caches: Mapping[str, LayerTensors], *, block_size: int) -> KVLayout:
        """See `Layout.describe`. Raises `BadLayout` naming layer, axis, expected and found size."""
        check_given(kv_caches, block_size)
        rules = self._rules or (PagedRule(),)
        chosen = rules_of_layers(self._rules, kv_caches)
        seen: list[SeenLayer] = []
        for index, rule in enumerate(rules):
            mine = {name: plane_tensors(name, kv_caches[name]) for name in kv_caches if chosen[name] == index}
            axes = rule.axes or self._axes
            if not axes:
                name, tensors = next(iter(mine.items()))
                raise undeclared(name, [tensor.shape for tensor in tensors], rule.block_size or block_size)
            for name, tensors in mine.items():
                seen += _see(name, tensors, axes, _slots(rule, block_size, name), index)
            check_apart({f"{name}[{at}]": tensor for name, pair in mine.items() for at, tensor in enumerate(pair)})
        return declare(
            self.name,
            group_layers(seen),
            rules,
            block_size,
            lambda rule: rule.axes or self._axes,
            chunk_tokens=self._chunk_tokens,
        )

    def block_views(self, layout: KVLayout, kv_caches: Mapping[str, LayerTensors]) -> BlockViews:
        """See `Layout.block_views`. Axes, sizes and strides are those of the declaration."""
        chosen = rules_of_layers(self._rules, kv_caches)
        declared = {name: group for group in layout.groups for name in group.layer_names}
        seen: list[SeenLayer] = []
        for name, tensors in kv_caches.items():
            group = declared.get(name) or declared.get(f"{name}.0")
            if group is None:
                raise BadLayout(f"layer {name} was not declared", available=", ".join(list(declared)[:8]))
            seen += _see(name, plane_tensors(name, tensors), group.axes, group.slots, chosen[name])
        return views_of(layout, group_layers(seen))


def _see(name: str, tensors: Sequence[TensorLike], axes: Sequence[str], slots: int, rule: int) -> Iterator[SeenLayer]:
    """The layers of one entry of the engine's memory, checked against the axes."""
    if len(tensors) == 2 and "plane" in axes:
        raise BadLayout(
            "the layer is a pair of tensors, but its axes include a plane", where=f"layer {name}", available="one"
        )
    for tensor in tensors:
        check_sizes(name, tensor, axes, slots)
    if "layer" in axes:
        same_size(
            {f"{name}[{at}]": tensor.shape[axes.index("layer")] for at, tensor in enumerate(tensors)},
            "the number of layers",
        )
    inner = [axis for axis in axes if axis not in ("layer", "plane")]
    strides = {tuple(tensor.stride()) for tensor in tensors}
    for index, planes in enumerate(unbind(tensors, axes)):
        yield SeenLayer(
            f"{name}.{index}" if "layer" in axes else name,
            [block_view(plane, inner, slots) for plane in planes],
            rule,
            strides.copy().pop() if len(strides) == 1 else (),
        )


def _slots(rule: PagedRule, block_size: int, name: str) -> int:
    tokens = rule.block_size or block_size
    if rule.state:
        return 1
    if tokens % rule.compress_ratio:
        raise BadLayout(
            f"block_size {tokens} is not a multiple of compress_ratio {rule.compress_ratio}", where=f"layer {name}"
        )
    return tokens // rule.compress_ratio
