"""A chain of SHA-256 over the chunks of a request: runs of them by the hash kernel, those with an extra one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from kvf_hashers.sha256_kernel import load_chain
from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, Buffer
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
