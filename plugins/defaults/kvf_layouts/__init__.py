"""The first-party layouts: `paged`, `opaque` and `dynamic_cache`. Imported by servers without torch and by engines."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvf_layouts.declaring import MOST, OpaqueRule, PagedRule
from kvf_layouts.dynamic_cache import DynamicCacheLayout
from kvf_layouts.opaque import OpaqueLayout
from kvf_layouts.paged import PagedLayout
from kvframework.api.layout import LayoutProvider, hookimpl
from kvframework.api.plugin import Options


class PagedOptions(Options, frozen=True):
    """Options of `layout.paged`. A server needs none: engines declare them."""

    axes: Annotated[
        tuple[str, ...],
        Meta(description="axes of one layer's tensor, outermost first, for groups that do not set axes"),
    ] = ()
    groups: Annotated[
        tuple[PagedRule, ...],
        Meta(description="layer groups, see below; not set: layers of equal shape and dtype form one group"),
    ] = ()
    chunk_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST,
            description="tokens in a chunk, whole blocks, if the engine's own digests name chunks of that size; "
            "0: the server's `chunk_size`",
        ),
    ] = 0


class OpaqueOptions(Options, frozen=True):
    """Options of `layout.opaque`. A server needs none: engines declare them."""

    packing: Annotated[
        str,
        Meta(
            max_length=128,
            description="names the order of bytes in a block and all that must be equal to read it (instruction set, "
            "dtype, block and head size); engines must declare it. It is part of the object's form, "
            "and so of the namespace",
        ),
    ] = ""
    block_axis: Annotated[
        int | None,
        Meta(description="number of the axis of a layer's tensor that counts blocks, from 0; engines must set it"),
    ] = None
    groups: Annotated[tuple[OpaqueRule, ...], Meta(description="layer groups, see below")] = ()
    chunk_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST,
            description="tokens in a chunk, whole blocks, if the engine decides where it keeps recurrent states; "
            "0: the server's `chunk_size`",
        ),
    ] = 0


class DynamicCacheOptions(Options, frozen=True):
    """Options of `layout.dynamic_cache`. A server needs none: engines declare them."""

    states: Annotated[
        tuple[str, ...],
        Meta(
            description="patterns of the names of layers that are a recurrent state, a tensor `[blocks, elements]`: "
            "`*`, `?`, `[...]`; all other layers are pairs of keys and values"
        ),
    ] = ()


@hookimpl
def kvf_layouts() -> list[
    LayoutProvider[PagedOptions] | LayoutProvider[OpaqueOptions] | LayoutProvider[DynamicCacheOptions]
]:
    return [
        LayoutProvider(
            name="paged",
            summary="block tables with declared axes, in one tensor per layer, per plane or for all layers",
            options=PagedOptions,
            create=lambda chosen: PagedLayout(chosen.axes, chosen.groups, chosen.chunk_tokens),
        ),
        LayoutProvider(
            name="opaque",
            summary="block tables with an unknown order of bytes inside a block; stores whole blocks",
            options=OpaqueOptions,
            create=lambda chosen: OpaqueLayout(chosen.packing, chosen.block_axis, chosen.groups, chosen.chunk_tokens),
        ),
        LayoutProvider(
            name="dynamic_cache",
            summary="caches of transformers: keys and values [1, heads, tokens, dim] per layer, and recurrent states",
            options=DynamicCacheOptions,
            create=lambda chosen: DynamicCacheLayout(chosen.states),
        ),
    ]
