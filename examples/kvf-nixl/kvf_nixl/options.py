"""The options of the `nixl` tier, as they stand in its `[[l2]]` table."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvframework.api.plugin import Options


class NixlOptions(Options, frozen=True):
    """Options of the `nixl` tier."""

    path: Annotated[
        str, Meta(min_length=1, description="the folder of the values; made with mode 0700 if it is missing")
    ]
