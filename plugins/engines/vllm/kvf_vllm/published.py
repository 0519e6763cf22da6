"""The connector's events as vLLM's publisher sends them, among vLLM's own. Their medium is CPU, for blocks in any tier
of the server."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvf_vllm.events import BlocksRemoved, BlocksStored


class SaltedBlockStored(BlockStored, tag="BlockStored"):  # type: ignore[misc, call-arg]
    """vLLM's event with the field by which NVIDIA Dynamo keeps salts apart. Other readers skip it."""

    cache_salt: str | None = None


def published(event: BlocksStored | BlocksRemoved) -> KVCacheEvent:
    """vLLM's event for one of the connector's."""
    hashes = [maybe_convert_block_hash(each) for each in event.hashes]
    if isinstance(event, BlocksRemoved):
        return BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU)
    fields: dict[str, Any] = {
        "block_hashes": hashes,
        "parent_block_hash": maybe_convert_block_hash(event.parent) if event.parent is not None else None,
        "token_ids": list(event.tokens),
        "block_size": event.block_size,
        # Requests with adapters are not announced.
        "lora_id": None,
        "lora_name": None,
        "medium": MEDIUM_CPU,
        "extra_keys": list(event.extra_keys) or None,
    }
    return SaltedBlockStored(**fields, cache_salt=event.salt) if event.salt else BlockStored(**fields)
