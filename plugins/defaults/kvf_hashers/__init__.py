"""Key hashers of the framework itself: from token ids to chained chunk digests."""

from __future__ import annotations

from kvf_hashers.sha256 import SglangPages, Sha256
from kvframework.api.hasher import HasherProvider, hookimpl
from kvframework.api.plugin import NoOptions

__all__ = ["SglangPages", "Sha256", "kvf_key_hashers"]


@hookimpl
def kvf_key_hashers() -> list[HasherProvider[NoOptions]]:
    return [
        HasherProvider(name="sha256", summary="hashes chunks by chained SHA-256", create=lambda _: Sha256()),
        HasherProvider(
            name="sglang",
            summary="hashes chunks as SGLang hashes pages, to share with SGLang",
            create=lambda _: SglangPages(),
        ),
    ]
