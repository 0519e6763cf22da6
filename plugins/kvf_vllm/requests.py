"""What is asked of one vLLM request: whether its KV may be loaded and stored, under which salt, and what besides
its tokens names its content. Pure; `EngineRequest` says what of vLLM's request is looked at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

PREFIX = "kvframework."
_MAX_SALT = 256


class EngineRequest(Protocol):
    """What is looked at of `vllm.v1.request.Request`."""

    request_id: str
    all_token_ids: Sequence[int]
    block_hashes: Sequence[bytes]
    num_computed_tokens: int
    cache_salt: str | None
    kv_transfer_params: object
    lora_request: object | None
    mm_features: Sequence[Any]
    prompt_embeds: object | None
    pooling_params: object | None
    resumable: bool
    skip_reading_prefix_cache: bool

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True)
class Wish:
    """What a request allows. `own_salt`: part of the salt is the connector's own option, of which vLLM's block hashes
    know nothing. `reason` says why it is left out, "" if it is not."""

    load: bool = True
    store: bool = True
    salt: str = ""
    own_salt: bool = False
    reason: str = ""


def wish_of(request: EngineRequest) -> Wish:
    """By the request itself and its `kv_transfer_params`: `kvframework.load`, `kvframework.store` (booleans) and
    `kvframework.salt`. Whatever is not understood leaves the request out."""
    reason = _left_out(request)
    if reason:
        return Wish(False, False, reason=reason)
    given = request.kv_transfer_params
    # vLLM takes any value here from a body's `vllm_xargs`.
    if given is not None and not isinstance(given, Mapping):
        return Wish(False, False, reason="kv_transfer_params")
    told = {
        key.removeprefix(PREFIX): value
        for key, value in (given or {}).items()
        if isinstance(key, str) and key.startswith(PREFIX)
    }
    load, store, salt = told.pop("load", True), told.pop("store", True), told.pop("salt", "")
    if told or not (isinstance(load, bool) and isinstance(store, bool) and isinstance(salt, str)):
        return Wish(False, False, reason="kv_transfer_params")
    # Requests that need every prompt token computed (for their log-probabilities) read no cache.
    load = load and not request.skip_reading_prefix_cache
    return Wish(load, store, _joined(request.cache_salt or "", salt), own_salt=bool(salt))


def salted(salt: str, generation: str) -> str:
    """The salt of a request after the cache was reset: nothing from before is found."""
    return _joined(salt, generation)


def chunk_extras(request: EngineRequest, chunk_tokens: int) -> Mapping[int, bytes]:
    """By chunk: the digests of images and the like that lie in it, and where, since their tokens are all alike."""
    places: dict[int, list[tuple[str, int]]] = {}
    for feature in request.mm_features:
        offset, length = int(feature.mm_position.offset), int(feature.mm_position.length)
        for chunk in range(offset // chunk_tokens, -(-(offset + length) // chunk_tokens)):
            places.setdefault(chunk, []).append((str(feature.identifier), offset - chunk * chunk_tokens))
    return {chunk: json.dumps(["mm", *found]).encode() for chunk, found in places.items()}


def _left_out(request: EngineRequest) -> str:
    if request.lora_request is not None:
        return "lora"
    if request.prompt_embeds is not None:
        return "prompt_embeds"
    if request.pooling_params is not None:
        return "pooling"
    if request.resumable:
        return "streaming_input"
    return ""


def _joined(one: str, other: str) -> str:
    """One salt for two: either alone stays as it is, so that other engines can use it too."""
    if not (one and other) and len(one or other) <= _MAX_SALT:
        return one or other
    return hashlib.blake2b(json.dumps([one, other]).encode(), digest_size=16).hexdigest()
