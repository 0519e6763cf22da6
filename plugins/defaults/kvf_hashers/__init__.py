"""Key hashers of the framework itself: from token ids to chained chunk digests."""

from __future__ import annotations

from kvf_hashers.sha256 import SglangPages, Sha256
from kvframework.api.hasher import HasherProvider, hookimpl
from kvframework.api.plugin import NoOptions

__all__ = ["SglangPages", "Sha256", "kvf_key_hashers"]


def _sha256(_: NoOptions) -> Sha256:
    return Sha256()


def _sglang(_: NoOptions) -> SglangPages:
    return SglangPages()


@hookimpl
def kvf_key_hashers() -> list[HasherProvider[NoOptions]]:
    return [
        HasherProvider(name="sha256", summary="chained SHA-256", create=_sha256),
        HasherProvider(name="sglang", summary="SGLang's page hashes, for engines that share with it", create=_sglang),
    ]
