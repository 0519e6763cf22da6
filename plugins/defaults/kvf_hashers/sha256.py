"""The SHA-256 key hasher. Pure; runs in engines and in the server, in any thread."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from kvf_hashers.sha256_kernel import load_chain
from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, Buffer, KeyHasher
from kvframework.errors import RequestError


def chained(
    tokens: Buffer,
    chunk_tokens: int,
    digest: bytes,
    gap: int,
    extras: Mapping[int, bytes] | None,
    folded: Callable[[bytes, bytes], bytes],
) -> bytes:
    """Return the digests of the whole chunks of `tokens`, packed u32, behind `digest`: each SHA-256(the digest before
    it, `gap` zero bytes, the chunk), or SHA-256(`folded`(the digest before it, its extra), the chunk), if it has an
    extra that is not empty. Raises `RequestError` for a negative index and a chunk without tokens."""
    if chunk_tokens < 1:
        raise RequestError(f"a chunk of {chunk_tokens} tokens", available="1 or more")
    extras = extras or {}
    if any(index < 0 for index in extras):
        raise RequestError(f"an extra at chunk {min(extras)}", available="0 or more, counted from the first chunk")
    view, step, chain = memoryview(tokens).cast("B"), chunk_tokens * TOKEN_BYTES, load_chain()
    if not extras:
        return chain(view, step, digest, gap)
    digests, begin, end = bytearray(), 0, view.nbytes // step * step
    for index in sorted(index for index, extra in extras.items() if extra and index < view.nbytes // step):
        at = index * step
        digests += chain(view[begin:at], step, digest, gap)
        begin = at + step
        state = hashlib.sha256(folded(bytes(digests[-DIGEST_BYTES:]) or digest, extras[index]))
        state.update(view[at:begin])
        digest = state.digest()
        digests += digest
    return bytes(digests + chain(view[begin:end], step, digest, gap))


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
