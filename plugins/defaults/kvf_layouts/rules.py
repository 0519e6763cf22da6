"""The rules by which an engine declares its layer groups: options of the layouts. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

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
            description="how many tokens before a position are needed there, 0 for all; where an engine's window "
            "counts the position itself (vLLM), one less than it",
        ),
    ] = 0
    state: Annotated[
        bool, Meta(description="a recurrent state: a block holds one slot, the state after its last token")
    ] = False


class PagedRule(GroupRule, frozen=True, forbid_unknown_fields=True):
    """A rule of `layout.paged`."""

    axes: Annotated[
        tuple[str, ...],
        Meta(description="this group's axes; of a state `block` and `dim`, and no `token`; none: the layout's"),
    ] = ()
    compress_ratio: Annotated[int, Meta(ge=1, le=MOST, description="tokens per stored slot")] = 1


class OpaqueRule(GroupRule, frozen=True, forbid_unknown_fields=True):
    """A rule of `layout.opaque`."""

    block_axis: Annotated[int | None, Meta(description="this group's block axis; not set: the layout's")] = None


def rules_of_layers(rules: Sequence[GroupRule], names: Iterable[str]) -> dict[str, int]:
    """The index of the first rule that matches each layer; 0 for all without rules.

    Raises `BadLayout` for a layer that no rule matches, and for a rule without a layer.
    """
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
                f"layer {name} is in none of the declared groups",
                where="layout.groups",
                available="; ".join(", ".join(rule.layers) for rule in rules),
                hint="declare a group for it",
            )
    for index, rule in enumerate(rules):
        if index not in found.values():
            raise BadLayout(
                f"no layer is left for {', '.join(rule.layers)}",
                where=f"layout.groups[{index}].layers",
                available=", ".join(list(found)[:8]),
                hint="the first group that fits takes a layer",
            )
    return found
