"""The payload structs of blend's requests and their table. They evolve by adding defaulted fields only.

Token ids and ranges travel packed, little-endian u32; digests packed, 32 bytes each. Counts are bounded here, before
anything is decoded for them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvf_blend.rotary import Rotary
from kvframework.api.keys import DIGEST_BYTES, TOKEN_BYTES
from kvframework.api.requests import Message, RequestSpec

MAX_TOKENS = 1 << 20
MAX_SEGMENTS = 4096
MAX_CHUNKS = 1 << 15
MAX_TEXT = 1024
# Tokens that stand before every segment: an attention sink needs few.
MAX_BEFORE = 4096

InstanceId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Tokens = Annotated[bytes, msgspec.Meta(max_length=MAX_TOKENS * TOKEN_BYTES)]
Ranges = Annotated[bytes, msgspec.Meta(max_length=MAX_SEGMENTS * 2 * TOKEN_BYTES)]
Before = Annotated[bytes, msgspec.Meta(max_length=MAX_BEFORE * TOKEN_BYTES)]
Digests = Annotated[bytes, msgspec.Meta(max_length=MAX_CHUNKS * DIGEST_BYTES)]


class Segment(Message, frozen=True):
    """Tokens `[start, start + tokens)` of a prompt, under the digests of their content alone: one for each chunk, the
    last one padded. `held`: L1 has all their objects now, of the instance's rank, or of all ranks if it has none."""

    start: Count
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    digests: Digests
    held: bool = False


Segments = Annotated[tuple[Segment, ...], msgspec.Meta(max_length=MAX_SEGMENTS)]


class RegisterBlend(Message, frozen=True):
    """CB_REGISTER_KV_CACHE: the rotary parameters of an instance that has registered its KV memory already. `before`
    are the tokens that it computes every segment behind; none: alone."""

    instance_id: InstanceId
    model_name: Text
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    rotary: Rotary
    before: Before = b""


class BlendRegistered(Message, frozen=True):
    """`fingerprint` names the rotation and what stands before segments, 16 bytes; `chunk_tokens` is the namespace's
    chunk."""

    fingerprint: bytes
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)]


class UnregisterBlend(Message, frozen=True):
    """CB_UNREGISTER_KV_CACHE: no more blending; the instance stays registered."""

    instance_id: InstanceId


class BlendUnregistered(Message, frozen=True):
    """The server has dropped the rotary parameters."""


class StorePreComputed(Message, frozen=True):
    """CB_STORE_PRE_COMPUTED: names the marked segments of `tokens` and makes them known. They are marked by a
    `separator` between them or by `ranges`, pairs (start, end): one of the two."""

    instance_id: InstanceId
    request_id: Text
    tokens: Tokens
    separator: Tokens = b""
    ranges: Ranges = b""
    cache_salt: Text = ""


class SegmentNames(Message, frozen=True):
    """The segments in the order of the prompt. The engine computes each that is not `held` from position 0, behind the
    instance's `before` and nothing else, and stores the segment's part of it."""

    segments: Segments


class LookupPreComputed(Message, frozen=True):
    """CB_LOOKUP_PRE_COMPUTED: looks up the parts of the prompt `tokens`. Marked segments are looked for in all tiers;
    those that this server knows are found anywhere, also without a separator and ranges. Of any registered instance."""

    instance_id: InstanceId
    request_id: Text
    tokens: Tokens
    separator: Tokens = b""
    ranges: Ranges = b""
    cache_salt: Text = ""


class Hits(Message, frozen=True):
    """The hits, pinned under `ticket` ("": nothing). The first `prefix_tokens` have KV under `prefix_digests`: of
    exactly this prefix if `exact`, else of a blended one (CB_STORE_FINAL). `segments` begin behind it, ordered by
    start, without overlap. At least the last token of the prompt is in none of them."""

    prefix_tokens: Count = 0
    prefix_digests: Digests = b""
    exact: bool = True
    segments: Segments = ()
    ticket: str = ""


class RetrievePreComputed(Message, frozen=True):
    """CB_RETRIEVE_PRE_COMPUTED: the `Hits` that the instance will load, all of them or fewer."""

    instance_id: InstanceId
    request_id: Text
    prefix_tokens: Count = 0
    prefix_digests: Digests = b""
    segments: Segments = ()
    cache_salt: Text = ""


class Piece(Message, frozen=True):
    """Tokens `[source, source + tokens)` of the plan's digests go to prompt positions `[start, start + tokens)`, with
    their keys rotated by `shift` positions: they were computed at `start - shift`."""

    source: Annotated[int, msgspec.Meta(ge=0)]
    start: Count
    tokens: Count
    shift: Annotated[int, msgspec.Meta(ge=-MAX_BEFORE, le=MAX_TOKENS)]


class LoadPlan(Message, frozen=True):
    """The load of the instance's rank by ONE retrieve of `digests`, pinned under `ticket` ("": nothing) until
    FREE_LOOKUP_LOCKS. `source` counts whole chunks of the namespace, one for each digest."""

    digests: Digests = b""
    pieces: Annotated[tuple[Piece, ...], msgspec.Meta(max_length=MAX_SEGMENTS + 1)] = ()
    ticket: str = ""


class StoreFinal(Message, frozen=True):
    """CB_STORE_FINAL: names the KV of a whole blended prompt, which is near to exact but not exact."""

    instance_id: InstanceId
    request_id: Text
    tokens: Tokens
    cache_salt: Text = ""


class FinalNames(Message, frozen=True):
    """The digests of the prompt's whole chunks; no LOOKUP of the core ever asks for them."""

    digests: Digests


CB_REGISTER_KV_CACHE = RequestSpec("blend.CB_REGISTER_KV_CACHE", RegisterBlend, BlendRegistered)
CB_UNREGISTER_KV_CACHE = RequestSpec("blend.CB_UNREGISTER_KV_CACHE", UnregisterBlend, BlendUnregistered)
CB_STORE_PRE_COMPUTED = RequestSpec("blend.CB_STORE_PRE_COMPUTED", StorePreComputed, SegmentNames)
CB_LOOKUP_PRE_COMPUTED = RequestSpec("blend.CB_LOOKUP_PRE_COMPUTED", LookupPreComputed, Hits, deadline_s=10.0)
CB_RETRIEVE_PRE_COMPUTED = RequestSpec("blend.CB_RETRIEVE_PRE_COMPUTED", RetrievePreComputed, LoadPlan)
CB_STORE_FINAL = RequestSpec("blend.CB_STORE_FINAL", StoreFinal, FinalNames)

REQUESTS: tuple[RequestSpec, ...] = (
    CB_REGISTER_KV_CACHE,
    CB_UNREGISTER_KV_CACHE,
    CB_STORE_PRE_COMPUTED,
    CB_LOOKUP_PRE_COMPUTED,
    CB_RETRIEVE_PRE_COMPUTED,
    CB_STORE_FINAL,
)
