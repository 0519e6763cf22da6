"""The content of a simulation: a few prompts of a few chunks, some with a common beginning, of two layer groups."""

from __future__ import annotations

import hashlib

from kvframework.api.keys import CacheKey, PackedKey, key_prefix
from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.storage.namespaces import NamespaceRecord

CHUNK = 16
CHUNKS = 4
PROMPTS = 4
NAMESPACE = bytes(range(1, 17))
# One unit of the arena, and three.
DESC = MemoryLayoutDesc(CHUNK, (GroupDesc((1, 1, CHUNK, 5), "uint8"), GroupDesc((1, 1, CHUNK, 600), "uint8")))
RECORD = NamespaceRecord("model", 1, DESC)
SIZES = [group.nbytes for group in DESC.groups]
_PREFIXES = [key_prefix(NAMESPACE, bytes(16), 0, group) for group in range(len(SIZES))]
_DIGESTS = [
    [(chunk if chunk < 2 and prompt < 3 else 100 * prompt + chunk + 50).to_bytes(32, "big") for chunk in range(CHUNKS)]
    for prompt in range(PROMPTS)
]


def items_of(prompt: int, first: int, end: int) -> list[tuple[PackedKey, int]]:
    return [
        (prefix + digest, nbytes)
        for digest in _DIGESTS[prompt][first:end]
        for prefix, nbytes in zip(_PREFIXES, SIZES, strict=True)
    ]


def lookup_key(prompt: int, end: int, request_id: str) -> CacheKey:
    return CacheKey("model", 1, None, NAMESPACE, 0, end * CHUNK, request_id, digests=b"".join(_DIGESTS[prompt][:end]))


def _content(key: PackedKey, nbytes: int) -> bytes:
    return (hashlib.sha256(key).digest() * (nbytes // 32 + 1))[:nbytes]


# The only right bytes of each object.
CONTENT = {key: _content(key, nbytes) for prompt in range(PROMPTS) for key, nbytes in items_of(prompt, 0, CHUNKS)}
