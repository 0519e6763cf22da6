"""The content of a store or load, for a server that tells routers: tokens, vLLM's block hashes, images, the adapter's
name. Pure."""

from __future__ import annotations

import array
import struct
import sys

from kvf_vllm.requests import EngineRequest, Wish, chunk_extras
from kvframework.api.content import ChunkContent, Extra, Image

_HASH_MASK = (1 << 64) - 1


def content_of(
    request: EngineRequest, wish: Wish, start: int, end: int, *, chunk_tokens: int, block_size: int, adapter: str = ""
) -> ChunkContent:
    """The content of tokens `[start, end)`, whole chunks. `block_size` is that of vLLM's block hashes, 0 if its events
    are off; `adapter` names the content of the request's adapter, "" for none."""
    tokens = array.array("I", request.all_token_ids[start:end])
    if sys.byteorder == "big":
        tokens.byteswap()
    first, last = start // chunk_tokens, end // chunk_tokens
    extras = chunk_extras(request, chunk_tokens, adapter)
    hashes = _hashes(request, wish, start, end, block_size)
    lora = request.lora_request
    return ChunkContent(
        tokens.tobytes(),
        tuple(Extra(chunk - first, extra) for chunk, extra in sorted(extras.items()) if first <= chunk < last),
        block_size if hashes else 0,
        hashes,
        tuple(
            Image(str(each.identifier), int(each.mm_position.offset) - start, int(each.mm_position.length))
            for each in request.mm_features
            if start < each.mm_position.offset + each.mm_position.length and each.mm_position.offset < end
        ),
        str(lora.lora_name) if lora is not None else "",
    )


def _hashes(request: EngineRequest, wish: Wish, start: int, end: int, block_size: int) -> bytes:
    """vLLM's hashes of the blocks as its events have them by default, b"" where they do not name the content: they
    cover neither the connector's own salt nor what an adapter holds."""
    if not block_size or start % block_size or end % block_size or wish.own_salt or request.lora_request is not None:
        return b""
    span = request.block_hashes[start // block_size : end // block_size]
    if len(span) * block_size != end - start:
        return b""
    return struct.pack(f"<{len(span)}Q", *(int.from_bytes(each, "big") & _HASH_MASK for each in span))
