"""The options of blend in the server's TOML."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvframework.api.plugin import Options


class BlendOptions(Options, frozen=True):
    """The `[[requests]]` table with `use = "blend"`."""

    known_segments: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 22,
            description="segments that are found in a prompt which does not mark them; those not met for longest are "
            "forgotten (some 600 bytes of memory each, and 32 more a chunk). Marked ones are found without it",
        ),
    ] = 65536
