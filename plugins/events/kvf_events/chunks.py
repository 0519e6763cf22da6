"""Chunks as a router's blocks: their tokens, their hashes, their extra keys. Pure.

A block is `block_size` tokens, as the router counts them. Its hash is the engine's own where that is known, else a
chain of XXH3 from the end of the chunk before: so two prompts that part in the middle of a chunk share the hashes of
the blocks before, as they share them for a router. It is a name and no proof: at worst a router sends a request to a
node that has to compute it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import xxhash

from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, KeyHasher
from kvframework.api.keys import ChunkContent, Image

# The tag by which NVIDIA Dynamo tells salts from the other extra keys.
SALT_TAG = "dynamo-cache-salt:"

# Of one block: (identifier, offset in the block) of an image, a LoRA's name, a salt.
ExtraKeys = tuple[tuple[str, int] | str, ...]

# Tokens between an image's first one and the first of its content.
_FARTHEST = 1 << 40


class Chunk(NamedTuple):
    """One chunk. `parent` is the digest of the chunk before, b"" for the first; `tokens` are packed u32; `hashes` has
    one for each block; `extra_keys` has an entry for each block, () if none has any."""

    digest: bytes
    parent: bytes
    tokens: bytes
    hashes: tuple[int, ...]
    extra_keys: tuple[ExtraKeys | None, ...] = ()
    lora_name: str = ""


def root_of(model: str, salt: str, lora_name: str) -> int:
    """Return where the chain of hashes of a model's prompts begins."""
    named = "\0".join((model, salt, lora_name)).encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(named)


def chunks_of(
    content: ChunkContent, digests: bytes, start: int, *, chunk_tokens: int, block_size: int, model: str, salt: str
) -> list[Chunk | None]:
    """Return the chunks of a content that begins at token `start`; None for one that cannot be described to a router,
    for all of them if the images are none of a prompt's. `digests` are those of the request from its first chunk.
    `block_size` divides `chunk_tokens`."""
    made: list[Chunk | None] = []
    extras = {each.chunk for each in content.extras if each.content}
    root = root_of(model, salt, content.lora_name)
    own = struct.unpack(f"<{len(content.hashes) // 8}Q", content.hashes) if content.block_size == block_size else ()
    blocks = chunk_tokens // block_size
    first = start // chunk_tokens
    images = _by_block(content.images, len(content.tokens) // TOKEN_BYTES, block_size)
    if images is None:
        return [None] * (len(content.tokens) // TOKEN_BYTES // chunk_tokens)
    for index in range(len(content.tokens) // TOKEN_BYTES // chunk_tokens):
        at = (first + index) * DIGEST_BYTES
        begin = index * chunk_tokens
        end = begin + chunk_tokens
        keys = _extra_keys(images, content.lora_name, range(index * blocks, (index + 1) * blocks), block_size)
        if index in extras and not keys:
            made.append(None)
            continue
        tokens = content.tokens[begin * TOKEN_BYTES : end * TOKEN_BYTES]
        parent = digests[at - DIGEST_BYTES : at] if at else b""
        digest = digests[at : at + DIGEST_BYTES]
        hashes = own[index * blocks : (index + 1) * blocks] or _chained(root, parent, digest, tokens, block_size, keys)
        made.append(Chunk(digest, parent, tokens, hashes, keys, content.lora_name))
    return made


def verified(content: ChunkContent, digests: bytes, start: int, chunk_tokens: int, hasher: KeyHasher) -> bool:
    """Return whether a content is what its digests name. Hashes all of it: 1 us a KiB."""
    at = start // chunk_tokens * DIGEST_BYTES
    parent = digests[at - DIGEST_BYTES : at] if at else b""
    extras = {each.chunk: each.content for each in content.extras}
    made = hasher.chunk_digests(content.tokens, chunk_tokens, parent=parent, extras=extras)
    return made == digests[at:]


def _chained(
    root: int, parent: bytes, own: bytes, tokens: bytes, block_size: int, keys: tuple[ExtraKeys | None, ...]
) -> tuple[int, ...]:
    """Return 63-bit hashes: every reader of int64 and of u64 takes them for the same number."""
    digest = xxhash.xxh3_64_intdigest
    seed = digest(parent, seed=root) if parent else root
    size = block_size * TOKEN_BYTES
    hashes = []
    for number, at in enumerate(range(0, len(tokens), size)):
        block = tokens[at : at + size]
        if keys and keys[number]:
            block += repr(keys[number]).encode("utf-8", "surrogatepass")
        seed = digest(block, seed=seed) >> 1
        hashes.append(seed)
    # The last block ends where the chunk does: its name is the one from which the next chunk goes on.
    hashes[-1] = digest(own, seed=root) >> 1
    return tuple(hashes)


def _by_block(images: Sequence[Image], tokens: int, size: int) -> dict[int, list[Image]] | None:
    """Return the images of each block of a content, None if there are so many that they lie upon each other or have a
    few tokens each: a small message must not become a large one."""
    found: dict[int, list[Image]] = {}
    room = 2 * (tokens // size) + tokens // 2
    for each in images:
        last = (min(each.offset + each.length, tokens) - 1) // size
        blocks = range(max(each.offset, 0) // size, last + 1)
        room -= len(blocks)
        if room < 0 or each.offset <= -_FARTHEST:
            return None
        for block in blocks:
            found.setdefault(block, []).append(each)
    return found


def _extra_keys(
    images: Mapping[int, Sequence[Image]], lora_name: str, blocks: range, size: int
) -> tuple[ExtraKeys | None, ...]:
    """Return the extra keys by block, in vLLM's order: the LoRA's name, then the images."""
    if not lora_name and not any(block in images for block in blocks):
        return ()
    own = (lora_name,) if lora_name else ()
    named = ((own + tuple((each.identifier, each.offset - at * size) for each in images.get(at, ()))) for at in blocks)
    return tuple(keys or None for keys in named)
