"""What the tokens of a transfer are, for routers: the optional content of a STORE or RETRIEVE, sent only to a server
that asks for it. Every byte format here is little-endian and part of the stable protocol."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvframework.api.types import Message

__all__ = ["HASH_BYTES", "ChunkContent", "Extra", "Image"]

# A block hash of an engine: u64.
HASH_BYTES = 8
MAX_EXTRA_BYTES = 1 << 16
MAX_TEXT = 1024
MAX_EXTRAS = 1 << 15

Name = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Extra(Message, frozen=True, array_like=True):
    """The bytes that the hasher folds into a chunk; `chunk` counts from the first token of the content."""

    chunk: int
    content: Annotated[bytes, msgspec.Meta(max_length=MAX_EXTRA_BYTES)]


class Image(Message, frozen=True, array_like=True):
    """An image, or a similar input, in the place of `length` tokens; `offset` counts from the first token of the
    content and is negative for one that begins before."""

    identifier: Name
    offset: int
    length: int


class ChunkContent(Message, frozen=True):
    """The content of the tokens `[start, end)` of a cache key.

    `tokens` are packed u32 ids, `(end - start) * 4` bytes. `extras` are those of its chunks. `hashes` are the engine's
    own block hashes, packed u64, one for each `block_size` tokens; b"" and 0 if it has none. `images` and `lora_name`
    say to routers what the extras mean: a chunk with an extra and without either is not announced.
    """

    tokens: bytes
    extras: Annotated[tuple[Extra, ...], msgspec.Meta(max_length=MAX_EXTRAS)] = ()
    block_size: int = 0
    hashes: bytes = b""
    images: Annotated[tuple[Image, ...], msgspec.Meta(max_length=MAX_EXTRAS)] = ()
    lora_name: Name = ""

    def problem(self, tokens: int, chunk_tokens: int) -> str:
        """Returns what is wrong with it as the content of `tokens` tokens, "" for nothing."""
        if len(self.tokens) != tokens * 4:
            return f"token ids of {len(self.tokens)} bytes for {tokens} tokens"
        if self.block_size < 0 or bool(self.block_size) != bool(self.hashes):
            return f"block size {self.block_size} with {len(self.hashes)} bytes of hashes"
        if self.block_size and len(self.hashes) * self.block_size != tokens * HASH_BYTES:
            return f"{len(self.hashes)} bytes of hashes of {self.block_size} tokens each for {tokens} tokens"
        if any(not 0 <= each.chunk < tokens // chunk_tokens for each in self.extras):
            return f"an extra of a chunk outside of {tokens} tokens"
        return ""
