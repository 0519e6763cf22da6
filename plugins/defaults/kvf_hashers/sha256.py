"""The key hashers of chained SHA-256: the framework's own, and that of SGLang's pages. Pure; in engines and in the
server, in any thread."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from kvframework.api.copying import address_of
from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, Buffer, KeyHasher
from kvframework.api.installing import load_library
from kvframework.errors import RequestError

# The Python side of the hash kernel (`native/sha256.c`), an optional part of the build; without it, `hashlib`.
#
# Blocking, without the GIL; a hash is a pure function, so any thread may call.

_LIBRARY = Path(__file__).with_name("native") / "libkvf_sha256.so"
_ABI = 1

# (tokens, bytes of a chunk, parent, gap) -> the digests of all whole chunks, each SHA-256(the digest before it, as many
# zero bytes as the gap, the chunk). `parent`, before the first, is empty or a digest; the gap is of 16 bytes at most.
Chain = Callable[[memoryview, int, bytes, int], bytes]


def chain_by_hashlib(tokens: memoryview, step: int, parent: bytes, gap: int) -> bytes:
    """A `Chain` of the standard library's calls, three a chunk."""
    sha256, between, digest, digests = hashlib.sha256, bytes(gap), parent, []
    for begin in range(0, tokens.nbytes - step + 1, step):
        state = sha256(digest + between)
        state.update(tokens[begin : begin + step])
        digest = state.digest()
        digests.append(digest)
    return b"".join(digests)


@functools.cache
def load_chain() -> Chain:
    """Return the kernel's `Chain`; that of `hashlib` where the kernel was not built, or not for this processor."""
    library = _library()
    return chain_by_hashlib if library is None else _by_kernel(library)


def _by_kernel(library: ctypes.CDLL) -> Chain:
    call = library.kvf_sha256_chain
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    call.argtypes = (pointer, size, size, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, pointer)
    call.restype = ctypes.c_int

    def chain(tokens: memoryview, step: int, parent: bytes, gap: int) -> bytes:
        chunks = tokens.nbytes // step
        digests = ctypes.create_string_buffer(chunks * DIGEST_BYTES)
        if not chunks:
            return b""
        if tokens.readonly:
            with address_of(tokens) as (address, _):
                status = call(address, chunks, step, parent, len(parent), gap, digests)
        else:
            # A tenth of the time of `address_of`, which counts for a short request.
            held = ctypes.c_char.from_buffer(tokens)
            status = call(ctypes.addressof(held), chunks, step, parent, len(parent), gap, digests)
        if status != 0:
            raise ValueError(f"the parent has {len(parent)} bytes, the gap {gap}")
        return digests.raw

    return chain


def _library() -> ctypes.CDLL | None:
    library = load_library(_LIBRARY, "kvf_sha256", _ABI, instead="hashlib computes the hashes")
    return library if library is not None and library.kvf_sha256_works() else None


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
        raise RequestError(f"the chunk has {chunk_tokens} tokens", available="1 or more")
    extras = extras or {}
    if any(index < 0 for index in extras):
        raise RequestError(f"an extra names chunk {min(extras)}", available="0 or more, counted from the first chunk")
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


class _Chained(KeyHasher):
    """`root` is before a request's first chunk, and `gap` zero bytes between a digest and its chunk."""

    root: bytes
    gap: int

    def chunk_digests(
        self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Mapping[int, bytes] | None = None
    ) -> bytes:
        """See `KeyHasher`. Raises `RequestError` for a parent that is no digest, a negative index and a chunk without
        tokens."""
        if len(parent) not in (0, DIGEST_BYTES):
            raise RequestError(f"the parent has {len(parent)} bytes", available=f"0 or {DIGEST_BYTES}")
        return chained(tokens, chunk_tokens, parent or self.root, self.gap, extras, self.folded)

    @staticmethod
    @abstractmethod
    def folded(digest: bytes, extra: bytes) -> bytes:
        """What is hashed before a chunk with an extra that is not empty: an empty one is the same as none."""


class Sha256(_Chained):
    """digest = SHA-256(parent, length of the extra as u32, extra, tokens of the chunk). The length keeps an extra from
    being taken for tokens. A change of any byte that is hashed changes the fingerprint."""

    name = "sha256"
    fingerprint = "sha256/1"
    root = hashlib.sha256(b"kvframework/sha256/1").digest()
    gap = 4

    @staticmethod
    def folded(digest: bytes, extra: bytes) -> bytes:
        return digest + len(extra).to_bytes(4, "little") + extra


class SglangPages(_Chained):
    """digest = SHA-256(parent, tokens of the chunk); the first chunk has no parent, as in SGLang's
    `get_storage_hash_str` for requests without an extra key and a salt. An extra, which SGLang's pages do not have,
    changes the parent to SHA-256 of a prefix, the parent and the extra."""

    name = "sglang"
    fingerprint = "sglang/1"
    root = b""
    gap = 0

    @staticmethod
    def folded(digest: bytes, extra: bytes) -> bytes:
        prefix = b"kvframework/sglang-pages/extra/1\0"
        return hashlib.sha256(prefix + len(digest).to_bytes(1, "little") + digest + extra).digest()
