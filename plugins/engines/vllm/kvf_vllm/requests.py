"""The facts about one vLLM request: whether its KV may be loaded and stored, its salt, the inputs besides its tokens
that name its content, its retention, and the content of a store or load, for a server that tells routers. Pure;
`EngineRequest` lists the fields of vLLM's request that are read.

Retention stands in vLLM's `kv_hints` (`vllm.v1.kv_hints`, from 0.32 on): actions with a type, a version and a payload,
which vLLM hands on unread. The action `kv.retain` is that of vLLM's proposals for retention; all others are left alone.
"""

from __future__ import annotations

import array
import hashlib
import json
import logging
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvf_vllm.step_messages import AdapterUse
from kvframework.api.keys import MAX_RETAINS, ChunkContent, Extra, Image, Retain, retain_of
from kvframework.api.process import LogLimit
from kvframework.errors import KVFrameworkError, RequestError

log = logging.getLogger(__name__)

TYPE, MAJOR = "kv.retain", "1"
# What L1 keeps at most, and the longest time that `retain_of` takes, for which tiers keep KV.
_LONGEST_S, _PROMISED_S = 3600.0, 30 * 86400.0


def retain_action(envelope: Any, prompt_tokens: int) -> tuple[Retain, ...]:
    """Return what the actions `kv.retain` of an envelope say, the first `MAX_RETAINS` ranges; () without any. Raises
    `RequestError`, which names what is wrong."""
    items: list[object] = []
    for action in getattr(envelope, "actions", None) or ():
        if action.action_type != TYPE:
            continue
        if str(action.action_version).partition(".")[0] != MAJOR:
            raise _wrong(f"the version is {str(action.action_version)[:20]!r}", f"{MAJOR}.x")
        directives = action.payload.get("directives") if isinstance(action.payload, Mapping) else None
        if not isinstance(directives, list):
            raise _wrong("the payload has no list `directives`", "a list of objects")
        items += directives[: MAX_RETAINS - len(items)]
    return retain_of([_range(item, prompt_tokens) for item in items])


def _range(item: object, prompt_tokens: int) -> object:
    """Return a directive as `retain_of` reads it. Theirs has no end of time where there is no `duration`; ours ends
    with the longest one of L1."""
    if not isinstance(item, Mapping):
        raise _wrong(f"a directive is {str(item)[:40]!r}", "an object")
    said = {key: value for key, value in item.items() if value is not None}
    if said.pop("covers_output", False) is True:
        said["start"] = prompt_tokens
    if "priority" not in said:
        raise _wrong("the directive has no priority", "0 to 100")
    duration = said.setdefault("duration", _LONGEST_S)
    if isinstance(duration, (int, float)) and duration > _PROMISED_S:
        said["duration"] = _PROMISED_S
    return {"start": 0, **said}


def _wrong(fact: str, expected: str) -> RequestError:
    return RequestError(
        fact,
        where=f"kv_hints, {TYPE}",
        available=expected,
        hint="see https://github.com/kvframework/kvframework/tree/main/docs/hints.md",
    )


PREFIX = "kvframework."
_MAX_SALT = 256
_MAX_CONVERSATION = 256


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
    future of its KV, and `ignored` what was wrong with that, "" for nothing: it is no more than a hint. What has the
    same `conversation` can be forgotten together."""

    load: bool = True
    store: bool = True
    salt: str = ""
    own_salt: bool = False
    reason: str = ""
    retain: tuple[Retain, ...] = ()
    ignored: str = ""
    conversation: str = ""


class Asking(Protocol):
    """What the scheduler of either connector knows of a request. `adapter` is None without one, and as long as it has
    no name. `was_asked_again`: it waited a step for news of the weights."""

    request: EngineRequest
    wish: Wish
    adapter: AdapterUse | None
    was_asked_again: bool


def wish_of(request: EngineRequest) -> Wish:
    """The wish in the request itself and its `kv_transfer_params`: `kvframework.load`, `kvframework.store` (booleans),
    `kvframework.salt`, `kvframework.conversation` and `kvframework.retain` (see `retain_of`), without which vLLM's
    `kv_hints` count. An unknown key or value leaves the request out; only a wrong `retain` is ignored, since it is a
    hint: a request that could not be forgotten by its conversation is not cached."""
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
    hint, conversation = wishes.pop("retain", None), wishes.pop("conversation", "")
    texts = isinstance(salt, str) and isinstance(conversation, str) and len(conversation) <= _MAX_CONVERSATION
    if wishes or not (isinstance(load, bool) and isinstance(store, bool) and texts):
        return Wish(False, False, reason="kv_transfer_params")
    # Requests that need every prompt token computed (for their log-probabilities) read no cache.
    load = load and not request.skip_reading_prefix_cache
    retain, ignored = _retained(hint, request)
    salt_of_both = _joined(request.cache_salt or "", salt)
    return Wish(load, store, salt_of_both, bool(salt), "", retain, ignored, conversation)


def current_wish(request: EngineRequest, once: LogLimit, *, weights_updated: bool) -> Wish:
    """Return `wish_of` a request in an engine whose weights may have been updated; a hint that is ignored is logged if
    `once` lets it pass."""
    wish = wish_of(request)
    # vLLM may still hold what the old weights made of an image.
    if request.mm_features and weights_updated and not wish.reason:
        wish = Wish(False, False, reason="weights_changed")
    if wish.ignored and once.passes("ignored"):
        log.warning(
            "ignored kvframework.retain or kv_hints of request %r; further such hints are ignored silently: %s",
            request.request_id,
            wish.ignored,
        )
    return wish


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
