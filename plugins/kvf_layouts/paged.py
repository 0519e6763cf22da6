"""Owns the layout `paged`: KV in blocks of a page table, as vLLM, SGLang and most engines hold it. Engine side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvf_layouts.grouping import (
    TensorGroup,
    block_view,
    check_declared,
    group_parts,
    parts_of,
    plane_tensors,
    same_size,
)
from kvframework.api import AXES, KVLayout, LayerGroup, LayerTensors, Layout, validate_layout
from kvframework.errors import BadLayout

if TYPE_CHECKING:
    import torch

EXAMPLES = (
    '["plane", "block", "token", "head", "dim"], ["block", "plane", "token", "head", "dim"], '
    '["plane", "block", "head", "token", "dim"] (HND), ["block", "token", "dim"] (MLA)'
)


class PagedLayout(Layout):
    """One tensor per layer, with or without a plane axis, or a pair of tensors per layer (keys, values).

    `axes` declares the axes of each tensor, outermost first; nothing is guessed from sizes. Without `block` the token
    axis holds all blocks one after the other; without `head` there is one head (MLA); with one tensor and no `plane`
    there is one plane. Stateless, thread-safe.
    """

    name = "paged"

    def __init__(self, axes: Sequence[str] = ()) -> None:
        """Raises `BadLayout` for axes that contradict themselves; no axes are fine where nothing is described."""
        self._axes = tuple(axes)
        if self._axes:
            _check_axes(self._axes)

    def describe(self, kv_caches: Mapping[str, LayerTensors], *, block_size: int) -> KVLayout:
        """See `Layout.describe`. Raises `BadLayout` naming layer, axis, what was expected and what was found."""
        if not kv_caches:
            raise BadLayout("there are no layers", available="layer name -> tensors, in layer order")
        if not self._axes:
            name, tensors = next(iter(kv_caches.items()))
            raise BadLayout(
                f"the axes of the tensors are not declared; layer {name} has {_shapes(name, tensors)}",
                where="layout.paged.axes",
                available=EXAMPLES,
                hint="give the layout's option `axes`; they are never guessed from sizes",
            )
        if block_size < 1:
            raise BadLayout(f"block_size is {block_size}", available="1 or more tokens")
        blocks = {name: self._check_layer(name, tensors, self._axes, block_size) for name, tensors in kv_caches.items()}
        layout = KVLayout(
            self.name,
            tuple(self._declare(group, block_size, kv_caches) for group in _groups(kv_caches, self._axes)),
            same_size(blocks, "the number of blocks"),
        )
        validate_layout(layout)
        return layout

    def block_views(self, layout: KVLayout, kv_caches: Mapping[str, LayerTensors]) -> list[list[list[torch.Tensor]]]:
        """See `Layout.block_views`. The axes are those of the declaration."""
        axes = layout.groups[0].axes
        _check_axes(axes)
        for name, tensors in kv_caches.items():
            self._check_layer(name, tensors, axes, layout.groups[0].block_size // layout.groups[0].compress_ratio)
        groups = _groups(kv_caches, axes)
        check_declared(layout.groups, groups)
        inner = tuple(axis for axis in axes if axis != "plane")
        return [
            [
                [block_view(layer[plane], inner, want.block_size // want.compress_ratio) for layer in group.layers]
                for plane in range(want.planes)
            ]
            for want, group in zip(layout.groups, groups, strict=True)
        ]

    def _declare(self, group: TensorGroup, block_size: int, kv_caches: Mapping[str, LayerTensors]) -> LayerGroup:
        strides = {
            tuple(tensor.stride()) for name in group.names for tensor in plane_tensors(name, kv_caches[name])
        }  # a declaration has one set of strides; layers that differ bring their own
        return LayerGroup(
            num_layers=len(group.names),
            block_size=block_size,
            heads=group.signature.heads,
            head_dim=group.signature.head_dim,
            dtype=group.signature.dtype,
            planes=group.signature.planes,
            axes=self._axes,
            strides=strides.pop() if len(strides) == 1 else (),
            layer_names=tuple(group.names),
        )

    @staticmethod
    def _check_layer(name: str, tensors: LayerTensors, axes: Sequence[str], slots: int) -> int:
        """Checks one layer against the declared axes and returns its number of blocks."""
        planes = plane_tensors(name, tensors)
        if len(planes) == 2 and "plane" in axes:
            raise BadLayout("a pair of tensors, though the axes have a plane", where=f"layer {name}", available="one")
        sizes: dict[str, int] = {}
        for tensor in planes:
            if tensor.dim() != len(axes):
                raise BadLayout(
                    f"shape {tuple(tensor.shape)} has {tensor.dim()} axes",
                    where=f"layer {name}",
                    available=f"{len(axes)}: {', '.join(axes)}",
                )
            sizes[f"{name}[{len(sizes)}]"] = tensor.shape[axes.index("block" if "block" in axes else "token")]
            if "plane" in axes and tensor.shape[axes.index("plane")] != 2:
                _refuse(name, tensor, axes, "plane", "2 (keys and values)")
            if "block" in axes and tensor.shape[axes.index("token")] != slots:
                _refuse(name, tensor, axes, "token", f"{slots} (the block size)")
        size = same_size(sizes, "the number of blocks" if "block" in axes else "the number of tokens")
        return size if "block" in axes else size // slots


def _check_axes(axes: Sequence[str]) -> None:
    unknown = [axis for axis in axes if axis not in AXES]
    missing = [axis for axis in ("token", "dim") if axis not in axes]
    if unknown or missing or len(set(axes)) != len(axes):
        raise BadLayout(
            f"axes are {list(axes)}", where="layout.paged.axes", available=EXAMPLES,
            hint=f"each of {', '.join(AXES)} at most once; token and dim always",
        )  # fmt: skip


def _groups(kv_caches: Mapping[str, LayerTensors], axes: Sequence[str]) -> list[TensorGroup]:
    inner = [axis for axis in axes if axis != "plane"]

    def planes(name: str, tensors: LayerTensors) -> Sequence[torch.Tensor]:
        found = plane_tensors(name, tensors)
        return found[0].unbind(axes.index("plane")) if "plane" in axes else found

    return group_parts(
        (name, signature, part)
        for name, tensors in kv_caches.items()
        for signature, part in parts_of(planes(name, tensors), inner)
    )


def _shapes(name: str, tensors: LayerTensors) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in plane_tensors(name, tensors))


def _refuse(name: str, tensor: torch.Tensor, axes: Sequence[str], axis: str, expected: str) -> None:
    raise BadLayout(
        f"axis {axis!r} (number {axes.index(axis)} of shape {tuple(tensor.shape)}) is {tensor.shape[axes.index(axis)]}",
        where=f"layer {name}",
        available=expected,
        hint=f"the declared axes are {', '.join(axes)}",
    )
