"""Owns the rules by which an engine's layers are declared to be layer groups: options of the layouts. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from kvframework.errors import BadLayout

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class GroupRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer group: the layers whose names match one of the patterns (`*`, `?`, `[...]`), and what they differ in.

    `block_size` 0 is the engine's. `window` is how many tokens before a position are needed there (0: all). `state`
    is a recurrent state: only the chunk that ends at a hit counts.
    """

    layers: tuple[str, ...] = ("*",)
    block_size: Count = 0
    window: Count = 0
    state: bool = False


class PagedRule(GroupRule, frozen=True, forbid_unknown_fields=True):
    """`axes` () are the layout's. `compress_ratio` is tokens per stored slot."""

    axes: tuple[str, ...] = ()
    compress_ratio: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 1


class OpaqueRule(GroupRule, frozen=True, forbid_unknown_fields=True):
    """`block_axis` None is the layout's."""

    block_axis: int | None = None


def rules_of_layers(rules: Sequence[GroupRule], names: Iterable[str]) -> dict[str, int]:
    """The index of the first rule that fits each layer; 0 for all without rules.

    Raises `BadLayout` for a layer that no rule fits, and for a rule without a layer.
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
                f"layer {name} is in none of the declared groups", where="layout.groups",
                available="; ".join(", ".join(rule.layers) for rule in rules), hint="declare a group for it",
            )  # fmt: skip
    for index, rule in enumerate(rules):
        if index not in found.values():
            raise BadLayout(
                f"no layer is left for {', '.join(rule.layers)}", where=f"layout.groups[{index}].layers",
                available=", ".join(list(found)[:8]), hint="the first group that fits takes a layer",
            )  # fmt: skip
    return found
