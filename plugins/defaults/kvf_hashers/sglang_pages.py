"""SGLang's own page hash as a key hasher: with it, other engines name chunks as SGLang names its pages. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from kvf_hashers.sha256 import chained
from kvframework.api.hasher import DIGEST_BYTES, Buffer, KeyHasher
from kvframework.errors import RequestError

_EXTRA = b"kvframework/sglang-pages/extra/1\0"


class SglangPages(KeyHasher):
    """digest = SHA-256(parent, tokens of the chunk); the first chunk has no parent, as in SGLang's
    `get_storage_hash_str` for requests without an extra key and a salt.

    An extra, which SGLang's pages do not have, changes the parent to SHA-256 of a prefix, the parent and the extra; an
    empty one is the same as none.
    """

    name = "sglang"
    fingerprint = "sglang/1"

    def chunk_digests(
        self,
        tokens: Buffer,
        chunk_tokens: int,
        *,
        parent: bytes = b"",
        extras: Mapping[int, bytes] | None = None,
    ) -> bytes:
        """See `KeyHasher`. Raises `RequestError` for a parent that is no digest, a negative index and a chunk without
        tokens."""
        if len(parent) not in (0, DIGEST_BYTES):
            raise RequestError(f"the parent has {len(parent)} bytes", available=f"0 or {DIGEST_BYTES}")
        return chained(tokens, chunk_tokens, parent, 0, extras, _folded)


def _folded(digest: bytes, extra: bytes) -> bytes:
    return hashlib.sha256(_EXTRA + len(digest).to_bytes(1, "little") + digest + extra).digest()
