"""The layout `llamacpp`: KV as llama.cpp holds it. Runs in engines, and in the server without torch."""

from __future__ import annotations

from kvf_llamacpp.options import LlamaCppOptions
from kvframework.api.layout import Layout, LayoutProvider, hookimpl


def _create(options: LlamaCppOptions) -> Layout:
    from kvf_llamacpp.layout import LlamaCppLayout

    return LlamaCppLayout(head_dim=options.head_dim, v_trans=options.v_trans)


@hookimpl
def kvf_layouts() -> list[LayoutProvider[LlamaCppOptions]]:
    """The provider of the layout."""
    return [
        LayoutProvider(
            name="llamacpp",
            summary="llama.cpp's cells: keys [cells, heads x dim], values so too or transposed",
            options=LlamaCppOptions,
            create=_create,
        )
    ]
