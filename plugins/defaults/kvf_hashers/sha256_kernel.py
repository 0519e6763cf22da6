"""The Python side of the hash kernel (`native/sha256.c`), an optional part of the build; without it, `hashlib`.

Blocking, without the GIL; a hash is a pure function, so any thread may call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from kvframework.api.copying import address_of
from kvframework.api.hasher import DIGEST_BYTES

log = logging.getLogger(__name__)

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
            raise ValueError(f"a chain behind {len(parent)} and {gap} bytes")
        return digests.raw

    return chain


def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(_LIBRARY))
    except OSError as error:
        log.debug("no hash kernel: %s", error)
        return None
    found = int(library.kvf_sha256_abi())
    if found != _ABI:
        log.warning("%s is of version %d, not %d: build it again; hashlib hashes instead", _LIBRARY, found, _ABI)
        return None
    return library if library.kvf_sha256_works() else None
