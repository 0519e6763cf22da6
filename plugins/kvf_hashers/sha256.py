"""The SHA-256 key hasher. Pure; runs in engines and in the server, in any thread."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from kvf_hashers.chains import chained
from kvframework.api.hasher import DIGEST_BYTES, Buffer, KeyHasher
from kvframework.errors import RequestError

# The parent of a request's first chunk. A change of this, or of any byte that is hashed, changes the fingerprint.
_ROOT = hashlib.sha256(b"kvframework/sha256/1").digest()
_PREFIX_BYTES = 4


class Sha256(KeyHasher):
    """digest = SHA-256(parent, length of the extra as u32, extra, tokens of the chunk).

    The length keeps an extra from being taken for tokens; an empty extra is the same as none.
    """

    name = "sha256"
    fingerprint = "sha256/1"

    def chunk_digests(
        self,
        tokens: Buffer,
        chunk_tokens: int,
        *,
        parent: bytes = b"",
        extras: Mapping[int, bytes] | None = None,
    ) -> bytes:
        """See `KeyHasher`. An extra behind the last whole chunk is ignored, as its tokens are.

        Raises `RequestError` for a parent that is no digest, a negative index and a chunk without tokens.
        """
        if len(parent) not in (0, DIGEST_BYTES):
            raise RequestError(f"the parent has {len(parent)} bytes", available=f"0 or {DIGEST_BYTES}")
        return chained(tokens, chunk_tokens, parent or _ROOT, _PREFIX_BYTES, extras, _folded)


def _folded(digest: bytes, extra: bytes) -> bytes:
    return digest + len(extra).to_bytes(_PREFIX_BYTES, "little") + extra
