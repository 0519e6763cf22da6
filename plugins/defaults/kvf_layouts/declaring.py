"""The declaration made from layer groups of tensors. Pure, engine side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvf_layouts.grouping import TensorGroup
from kvf_layouts.rules import GroupRule, PagedRule
from kvframework.api.layout import KVLayout, LayerGroup, validate_layout

R = TypeVar("R", bound=GroupRule)


def declare(
    name: str,
    groups: Sequence[TensorGroup],
    rules: Sequence[R],
    block_size: int,
    axes: Callable[[R], tuple[str, ...]],
    *,
    packing: str = "",
    stable: bool = True,
    chunk_tokens: int = 0,
) -> KVLayout:
    """The declaration. `stable` False: tensors are passed with each submit, so neither strides nor the number of blocks
    is declared. `chunk_tokens` as in `KVLayout`. Raises `BadLayout` or `BadDtype`."""
    blocks = [group.blocks() for group in groups] if stable else [0] * len(groups)
    most = max(blocks)
    declared = tuple(
        _declare(group, rules[group.signature.rule], block_size, axes, packing, stable, count if count != most else 0)
        for group, count in zip(groups, blocks, strict=True)
    )
    layout = KVLayout(name, declared, most, chunk_tokens)
    validate_layout(layout)
    return layout


def _declare(
    group: TensorGroup,
    rule: R,
    block_size: int,
    axes: Callable[[R], tuple[str, ...]],
    packing: str,
    stable: bool,
    num_blocks: int,
) -> LayerGroup:
    signature = group.signature
    return LayerGroup(
        num_layers=len(group.names),
        block_size=rule.block_size or block_size,
        heads=signature.heads,
        head_dim=signature.head_dim,
        dtype=signature.dtype,
        planes=signature.planes,
        axes=axes(rule),
        strides=group.one_stride() if stable else (),
        window=rule.window,
        compress_ratio=rule.compress_ratio if isinstance(rule, PagedRule) and not rule.state else 1,
        layer_names=tuple(group.names),
        state=rule.state,
        packing=packing,
        num_blocks=num_blocks,
    )
