"""The `blend` requests: reuse of KV that is not a prefix. This half runs in the server process.

Importing this module imports neither torch nor the engine's half (`kvf_blend.engine`), so that a server and a list of
plugins stay cheap.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from kvframework.api.plugin import Options
from kvframework.api.requests import CacheServices, Handler, RequestsProvider, hookimpl


class BlendOptions(Options, frozen=True):
    """The `[[requests]]` table with `use = "blend"`."""

    known_segments: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 22,
            description="number of segments that the server remembers to find them in prompts without separators; "
            "a segment takes 600 bytes of memory and 32 per chunk. 0: only segments between separators are found",
        ),
    ] = 65536


def _create(options: BlendOptions, services: CacheServices) -> list[Handler[Any]]:
    from kvf_blend.server.handlers import BlendHandlers

    return BlendHandlers(options, services).handlers()


@hookimpl
def kvf_request_handlers() -> list[RequestsProvider[BlendOptions]]:
    """The provider of blend's requests."""
    return [
        RequestsProvider(
            name="blend",
            summary="KV of documents found anywhere in a prompt (CacheBlend)",
            options=BlendOptions,
            create=_create,
        )
    ]
