"""The options of the layout. They belong to the engine, which declares its memory; a server needs none."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvframework.api.plugin import Options


class LlamaCppOptions(Options, frozen=True):
    """Options of the layout; each field has a description."""

    head_dim: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="elements of one head of keys and values; engines must declare it"),
    ] = None
    v_trans: Annotated[
        bool | None,
        Meta(description="values are transposed, as without flash attention; engines must declare it"),
    ] = None
