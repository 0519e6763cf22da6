"""Owns the options of the layout. They are the engine's, which declares what it holds; a server needs none."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvframework.api.options import Options


class LlamaCppOptions(Options, frozen=True):
    """See the descriptions of the fields."""

    head_dim: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="elements of one head of keys and values; engines must declare it"),
    ] = None
    v_trans: Annotated[
        bool | None,
        Meta(description="values are transposed, as without flash attention; engines must declare it"),
    ] = None
