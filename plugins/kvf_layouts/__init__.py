"""The first-party layouts: `paged` and `dynamic_cache`. Imported by servers without torch and by engines."""

from __future__ import annotations

from kvf_layouts.dynamic_cache import DynamicCacheLayout
from kvf_layouts.paged import PagedLayout
from kvframework.api import LayoutProvider, NoOptions, Options, hookimpl


class PagedOptions(Options, frozen=True):
    """`axes` names the axes of one layer's tensor, outermost first, for example ["plane", "block", "token", "head",
    "dim"]. A server needs none: engines declare them."""

    axes: tuple[str, ...] = ()


def _paged(options: PagedOptions) -> PagedLayout:
    return PagedLayout(options.axes)


def _dynamic_cache(_options: NoOptions) -> DynamicCacheLayout:
    return DynamicCacheLayout()


@hookimpl
def kvf_layouts() -> list[LayoutProvider[PagedOptions] | LayoutProvider[NoOptions]]:
    return [
        LayoutProvider(
            name="paged",
            summary="block tables: one tensor per layer with a plane axis, or one per plane, axes declared",
            options=PagedOptions,
            create=_paged,
        ),
        LayoutProvider(
            name="dynamic_cache",
            summary="transformers' DynamicCache: keys and values [1, heads, tokens, dim] per layer",
            create=_dynamic_cache,
        ),
    ]
