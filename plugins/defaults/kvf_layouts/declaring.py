"""The declaration made from layer groups of tensors: the rules that an engine gives, the grouping by them. Pure, engine
side."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from kvframework.api.layout import (
    BlockViews,
    KVLayout,
    LayerGroup,
    LayerTensors,
    TensorLike,
    dtype_name,
    validate_layout,
)
from kvframework.errors import BadLayout

MOST = 1 << 24


class GroupRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer group: the layers in it, and the properties in which groups differ."""

    layers: Annotated[tuple[str, ...], Meta(description="patterns of layer names: `*`, `?`, `[...]`")] = ("*",)
    block_size: Annotated[int, Meta(ge=0, le=MOST, description="tokens of a block; 0: the engine's")] = 0
    window: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST,
            description="number of tokens before a position that attention reads, 0 for all; if an engine's window "
            "counts the position itself (vLLM), the window minus 1",
        ),
    ] = 0
    state: Annotated[
        bool, Meta(description="a recurrent state: a block holds one slot, the state after its last token")
    ] = False


class PagedRule(GroupRule, frozen=True, forbid_unknown_fields=True):
    """A rule of `layout.paged`."""

    axes: Annotated[
        tuple[str, ...],
        Meta(
            description="axes of this group; for a state `block` and `dim`, without `token`; not set: the layout's axes"
        ),
    ] = ()
    compress_ratio: Annotated[int, Meta(ge=1, le=MOST, description="tokens per stored slot")] = 1


class OpaqueRule(GroupRule, frozen=True, forbid_unknown_fields=True):
    """A rule of `layout.opaque`."""

    block_axis: Annotated[int | None, Meta(description="block axis of this group; not set: the layout's")] = None


def rules_of_layers(rules: Sequence[GroupRule], names: Iterable[str]) -> dict[str, int]:
    """The index of the first rule that matches each layer; 0 for all without rules. Raises `BadLayout` for a layer that
    no rule matches, and for a rule without a layer."""
    if not rules:
        return dict.fromkeys(names, 0)
    found: dict[str, int] = {}
    for name in names:
        for index, rule in enumerate(rules):
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in rule.layers):
                found[name] = index
                break
        else:
            raise BadLayout(
                f"layer {name} is in no declared group",
                where="layout.groups",
                available="; ".join(", ".join(rule.layers) for rule in rules),
                hint="declare a group for the layer",
            )
    for index, rule in enumerate(rules):
        if index not in found.values():
            raise BadLayout(
                f"no layer is left for the group {', '.join(rule.layers)}",
                where=f"layout.groups[{index}].layers",
                available=", ".join(list(found)[:8]),
                hint="a layer belongs to the first group whose pattern fits",
            )
    return found


# Grouping of layers into layer groups. Pure, engine side.
#
# A layer is split into parts: planes of equal shape and dtype make one part, unequal keys and values make two. Parts of
# one rule with the same signature form a layer group: rule by rule, and within a rule in order of first appearance.


class SeenLayer(NamedTuple):
    """One layer as the declaration describes it. `planes` are block views; `rule` is the index of the rule that it
    falls under; `strides` are those of the engine's tensor, empty if it has no stable memory."""

    name: str
    planes: Sequence[TensorLike]
    rule: int = 0
    strides: tuple[int, ...] = ()


class Signature(NamedTuple):
    """The properties that layers of one group share. `role` separates unequal keys and values of different layers."""

    rule: int
    planes: int
    heads: int
    head_dim: int
    dtype: str
    role: str = "all planes"

    def fits(self, group: LayerGroup) -> bool:
        of_group = (group.planes, group.heads, group.head_dim, group.dtype)
        return (self.planes, self.heads, self.head_dim, self.dtype) == of_group


@dataclass
class TensorGroup:
    """Layers of one signature: their names and, per layer, the block view of each plane."""

    signature: Signature
    names: list[str] = field(default_factory=list)
    layers: list[Sequence[TensorLike]] = field(default_factory=list)
    strides: set[tuple[int, ...]] = field(default_factory=set)

    def blocks(self) -> int:
        """The number of blocks. Raises `BadLayout` naming two layers that differ."""
        sizes = {
            f"{name}[{plane}]": view.shape[0]
            for name, planes in zip(self.names, self.layers, strict=True)
            for plane, view in enumerate(planes)
        }
        return same_size(sizes, "the number of blocks")


def plane_tensors(name: str, tensors: LayerTensors) -> Sequence[TensorLike]:
    """The tensors of one layer as a sequence: one tensor, or a tensor per plane. Raises `BadLayout`."""
    if not isinstance(tensors, (tuple, list)):
        return (tensors,)  # type: ignore[return-value]
    if len(tensors) not in (1, 2):
        raise BadLayout(
            f"the layer has {len(tensors)} tensors",
            where=f"layer {name}",
            available="one tensor, or a pair (keys, values)",
        )
    return tensors


def group_layers(layers: Iterable[SeenLayer]) -> list[TensorGroup]:
    """The layer groups, rule by rule, and within a rule in order of first appearance."""
    groups: dict[Signature, TensorGroup] = {}
    for layer in layers:
        for signature, planes in _parts(layer):
            group = groups.setdefault(signature, TensorGroup(signature))
            group.names.append(layer.name)
            group.layers.append(planes)
            group.strides.add(layer.strides)
    return sorted(groups.values(), key=lambda group: group.signature.rule)


def views_of(layout: KVLayout, groups: Sequence[TensorGroup]) -> BlockViews:
    """`[group][plane][layer]`, see `Layout.block_views`. Raises `BadLayout` unless these are the declared groups."""
    _check_declared(layout, groups)
    return [
        [[layer[plane] for layer in group.layers] for plane in range(want.planes)]
        for want, group in zip(layout.groups, groups, strict=True)
    ]


def same_size(sizes: Mapping[str, int], what: str) -> int:
    """The size that all layers have. Raises `BadLayout` naming two layers that differ."""
    first_name, first = next(iter(sizes.items()))
    for name, size in sizes.items():
        if size != first:
            raise BadLayout(f"{what} is {size}", where=f"layer {name}", available=f"{first} as in layer {first_name}")
    return first


def _parts(layer: SeenLayer) -> list[tuple[Signature, Sequence[TensorLike]]]:
    """One part if all planes have the same heads, head size and dtype, else one part for each plane."""

    def signature(view: TensorLike, count: int, role: str) -> Signature:
        return Signature(layer.rule, count, view.shape[2], view.shape[3], dtype_name(view), role)

    together = {signature(view, len(layer.planes), "all planes") for view in layer.planes}
    if len(together) == 1:
        return [(together.pop(), layer.planes)]
    return [(signature(view, 1, role), (view,)) for view, role in zip(layer.planes, ("keys", "values"), strict=True)]


def _check_declared(layout: KVLayout, found: Sequence[TensorGroup]) -> None:
    declared = layout.groups
    if len(declared) != len(found):
        raise BadLayout(f"the tensors form {len(found)} layer groups", available=f"{len(declared)} as declared")
    for index, (want, have) in enumerate(zip(declared, found, strict=True)):
        where = f"layout.groups[{index}]"
        if len(have.names) != want.num_layers or not have.signature.fits(want):
            raise BadLayout(
                f"the group has {len(have.names)} layers with {have.signature}",
                where=where,
                available=f"{want.num_layers} layers, planes={want.planes}, heads={want.heads}, "
                f"head_dim={want.head_dim}, dtype={want.dtype}",
                hint="register again when the shapes have changed",
            )
        if want.layer_names and tuple(have.names) != want.layer_names:
            raise BadLayout(
                f"the group has the layers {', '.join(have.names)}", where=where, available=", ".join(want.layer_names)
            )
        fact, available = "", f"{want.strides} as declared"
        if want.strides and have.strides != {want.strides}:
            fact = f"strides {sorted(have.strides)}"
        elif (told := layout.blocks_of(index)) and (blocks := have.blocks()) != told:
            fact, available = f"{blocks} blocks", f"{told} as declared"
        if fact:
            hint = "register again when the engine's memory has changed"
            raise BadLayout(fact, where=where, available=available, hint=hint)


def check_given(kv_caches: Mapping[str, LayerTensors], block_size: int) -> None:
    """Raise `BadLayout` unless there are layers, and tokens in a block."""
    if not kv_caches:
        raise BadLayout("no layers were given", available="layer name -> tensors, in layer order")
    if block_size < 1:
        raise BadLayout(f"block_size is {block_size}", available="1 or more tokens")


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
    declared = []
    for group, count in zip(groups, blocks, strict=True):
        signature, rule = group.signature, rules[group.signature.rule]
        declared.append(
            LayerGroup(
                num_layers=len(group.names),
                block_size=rule.block_size or block_size,
                heads=signature.heads,
                head_dim=signature.head_dim,
                dtype=signature.dtype,
                planes=signature.planes,
                axes=axes(rule),
                # A declaration holds one set.
                strides=next(iter(group.strides)) if stable and len(group.strides) == 1 else (),
                window=rule.window,
                compress_ratio=rule.compress_ratio if isinstance(rule, PagedRule) and not rule.state else 1,
                layer_names=tuple(group.names),
                state=rule.state,
                packing=packing,
                num_blocks=count if count != most else 0,
            )
        )
    layout = KVLayout(name, tuple(declared), most, chunk_tokens)
    validate_layout(layout)
    return layout
