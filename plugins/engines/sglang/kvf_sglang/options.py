"""The options of backend and linker: the `kvframework.*` keys of SGLang's extra configuration. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvframework.client import EngineOptions, Seconds, engine_options

BACKEND = "--hicache-storage-backend-extra-config"
LINKER = "linker_extra_config of --unified-cache-external-linker-config"


class SglangOptions(EngineOptions, frozen=True):
    """Each field is the key `kvframework.<field>`."""

    lookup_deadline_s: Annotated[
        Seconds, msgspec.Meta(description="how long one question for pages may take, with their load from L2")
    ] = 1.0
    load_deadline_s: Annotated[Seconds, msgspec.Meta(description="how long one load of up to 128 pages may take")] = 2.0
    store_deadline_s: Annotated[Seconds, msgspec.Meta(description="how long one store of up to 128 pages may take")] = (
        5.0
    )


def parse_options(extra: Mapping[str, object], where: str = BACKEND) -> SglangOptions:
    """The options among SGLang's extra configuration, which the user knows as `where`. Raises as `engine_options`
    does."""
    return engine_options(extra, SglangOptions, where=where, page="docs/engines/sglang.md")
