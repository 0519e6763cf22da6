"""The `blend` requests: reuse of KV that is not a prefix. This half runs in the server process.

Importing this module imports neither torch nor the engine's half (`kvf_blend.engine`), so that a server and a list of
plugins stay cheap.
"""

from __future__ import annotations

from typing import Any

from kvf_blend.server.options import BlendOptions
from kvframework.api.requests import CacheServices, Handler, RequestsProvider, hookimpl


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
