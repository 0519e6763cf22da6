"""The facts about one vLLM request: whether its KV may be loaded and stored, its salt, and the inputs besides its
tokens that name its content. Pure; `EngineRequest` lists the fields of vLLM's request that are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvf_vllm.kv_hints import retain_action
from kvframework.api.retain import Retain, retain_of
from kvframework.errors import KVFrameworkError

PREFIX = "kvframework."
_MAX_SALT = 256


class EngineRequest(Protocol):
    """The fields of `vllm.v1.request.Request` that are read."""

    request_id: str
    all_token_ids: Sequence[int]
    block_hashes: Sequence[bytes]
    num_computed_tokens: int
    cache_salt: str | None
    kv_transfer_params: object
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: object | None
    pooling_params: object | None
    resumable: bool
    skip_reading_prefix_cache: bool
    trace_headers: Mapping[str, str] | None

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True)
class Wish:
    """The permissions of a request. `own_salt`: part of the salt is the connector's own option, which vLLM's block
    hashes do not cover. `reason` says why the request is left out, "" if it is not. `retain` is what it says of the
    future of its KV, and `ignored` what was wrong with that, "" for nothing: it is no more than a hint."""

    load: bool = True
    store: bool = True
    salt: str = ""
    own_salt: bool = False
    reason: str = ""
    retain: tuple[Retain, ...] = ()
    ignored: str = ""


def wish_of(request: EngineRequest) -> Wish:
    """The wish in the request itself and its `kv_transfer_params`: `kvframework.load`, `kvframework.store` (booleans),
    `kvframework.salt` and `kvframework.retain` (see `retain_of`), without which vLLM's `kv_hints` count. An unknown key
    or value leaves the request out; only a wrong `retain` is ignored, since it is a hint."""
    reason = _left_out(request)
    if reason:
        return Wish(False, False, reason=reason)
    given = request.kv_transfer_params
    # vLLM takes any value here from a body's `vllm_xargs`.
    if given is not None and not isinstance(given, Mapping):
        return Wish(False, False, reason="kv_transfer_params")
    wishes = {
        key.removeprefix(PREFIX): value
        for key, value in (given or {}).items()
        if isinstance(key, str) and key.startswith(PREFIX)
    }
    load, store, salt = wishes.pop("load", True), wishes.pop("store", True), wishes.pop("salt", "")
    hint = wishes.pop("retain", None)
    if wishes or not (isinstance(load, bool) and isinstance(store, bool) and isinstance(salt, str)):
        return Wish(False, False, reason="kv_transfer_params")
    # Requests that need every prompt token computed (for their log-probabilities) read no cache.
    load = load and not request.skip_reading_prefix_cache
    retain, ignored = _retained(hint, request)
    salt_of_both = _joined(request.cache_salt or "", salt)
    return Wish(load, store, salt_of_both, own_salt=bool(salt), retain=retain, ignored=ignored)


def _retained(hint: object, request: EngineRequest) -> tuple[tuple[Retain, ...], str]:
    try:
        if hint is None:
            # Releases before 0.32 have none.
            return retain_action(getattr(request, "kv_hints", None), request.num_tokens), ""
        return retain_of(hint), ""
    except KVFrameworkError as error:
        return (), str(error)


def traceparent(request: EngineRequest) -> str:
    """The `traceparent` header of a request, which vLLM keeps if it traces; "" without."""
    headers = request.trace_headers
    given = headers.get("traceparent", "") if isinstance(headers, Mapping) else ""
    return given if isinstance(given, str) else ""


def salted(salt: str, generation: str) -> str:
    """The salt of a request after the cache was reset: objects from before are no longer found."""
    return _joined(salt, generation)


def chunk_extras(request: EngineRequest, chunk_tokens: int, adapter: str = "") -> Mapping[int, bytes]:
    """By chunk: the digests and positions of images and similar inputs in it, since their tokens are all alike. The
    first chunk, and by it all others, are also named by the content of the request's adapter."""
    places: dict[int, list[tuple[str, int]]] = {}
    for feature in request.mm_features:
        offset, length = int(feature.mm_position.offset), int(feature.mm_position.length)
        for chunk in range(offset // chunk_tokens, -(-(offset + length) // chunk_tokens)):
            places.setdefault(chunk, []).append((str(feature.identifier), offset - chunk * chunk_tokens))
    extras = {chunk: json.dumps(["mm", *found]).encode() for chunk, found in places.items()}
    if adapter:
        extras[0] = json.dumps(["lora", adapter, places.get(0, [])]).encode()
    return extras


def _left_out(request: EngineRequest) -> str:
    if request.prompt_embeds is not None:
        return "prompt_embeds"
    if request.pooling_params is not None:
        return "pooling"
    if request.resumable:
        return "streaming_input"
    return ""


def _joined(one: str, other: str) -> str:
    """One salt for two: either alone stays unchanged, so that other engines can use it too."""
    if not (one and other) and len(one or other) <= _MAX_SALT:
        return one or other
    return hashlib.blake2b(json.dumps([one, other]).encode(), digest_size=16).hexdigest()
