"""Key hashers of the framework itself: from token ids to chained chunk digests."""

from __future__ import annotations

from kvf_hashers.sha256 import Sha256
from kvframework.api.hasher import HasherProvider, hookimpl
from kvframework.api.options import NoOptions

__all__ = ["Sha256", "kvf_key_hashers"]


def _create(_: NoOptions) -> Sha256:
    return Sha256()


@hookimpl
def kvf_key_hashers() -> list[HasherProvider[NoOptions]]:
    return [HasherProvider(name="sha256", summary="chained SHA-256", create=_create)]
