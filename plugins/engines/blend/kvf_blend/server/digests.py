"""The names of blend's objects: digests of the server's hasher, kept apart from those of prompts. Pure; runs in the
server's worker threads.

A segment's name covers its own tokens and those that every segment of the instance is computed behind, neither its
position nor the text before it. A change of any byte that is
hashed here needs a new number in the tag: objects under the old name are then no longer found.
"""

from __future__ import annotations

import struct

from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, KeyHasher

_SEGMENT = b"kvf-blend/segment/1"
_FINAL = b"kvf-blend/final/1"
_TAIL = b"tail"
# No vocabulary has this token id.
_PADDING = b"\xff\xff\xff\xff"


def chunks_of(tokens: int, chunk_tokens: int) -> int:
    """Chunks that a segment of `tokens` tokens fills, the last one perhaps in part."""
    return -(-tokens // chunk_tokens)


def segment_digests(hasher: KeyHasher, tokens: bytes, chunk_tokens: int, fingerprint: bytes) -> bytes:
    """One digest for each chunk of a segment of KV that was computed with the rotation and behind the tokens that
    `fingerprint` names, and nothing else. The last partial chunk is padded; how many tokens it has is part of its
    name."""
    extras = {0: _SEGMENT + fingerprint}
    count = len(tokens) // TOKEN_BYTES
    last, rest = divmod(count, chunk_tokens)
    if rest:
        extras[last] = extras.get(last, b"") + _TAIL + struct.pack("<I", rest)
        tokens += _PADDING * (chunk_tokens - rest)
    return hasher.chunk_digests(tokens, chunk_tokens, extras=extras)


def prompt_digests(hasher: KeyHasher, tokens: bytes, chunk_tokens: int) -> bytes:
    """The names under which every engine stores a prompt's whole chunks: exact KV."""
    return hasher.chunk_digests(tokens, chunk_tokens)


def final_digests(hasher: KeyHasher, tokens: bytes, chunk_tokens: int, fingerprint: bytes) -> bytes:
    """Names of a blended prompt's whole chunks: near to exact, so never those of a prompt."""
    return hasher.chunk_digests(tokens, chunk_tokens, extras={0: _FINAL + fingerprint})


def unpack(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
