"""The options of the `zstd` codec, as they stand in `[codecs.zstd]`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvframework.api.options import Options


class ZstdOptions(Options, frozen=True):
    level: Annotated[
        int,
        Meta(
            ge=-7,
            le=22,
            description="higher packs tighter and slower, negative is fastest; 0 is Zstandard's own default, 3",
        ),
    ] = 1
