"""Names of content: cache keys as engines send them, with what they say of its future, object keys as storage uses
them, and namespaces; and the content itself. Pure; all byte formats are little-endian, and stable."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from kvframework.api.layout import MemoryLayoutDesc
from kvframework.api.plugin import Message
from kvframework.errors import RequestError

__all__ = [
    "DIGEST_BYTES",
    "HASH_BYTES",
    "MAX_RETAINS",
    "PACKED_KEY_BYTES",
    "TOKEN_BYTES",
    "TRACEPARENT_CHARACTERS",
    "CacheKey",
    "ChunkContent",
    "Extra",
    "Image",
    "PackedKey",
    "Retain",
    "retain_of",
    "sampled_parent",
    "tenant_digest",
]

DIGEST_BYTES = 32
NAMESPACE_BYTES = 16
SALT_BYTES = 16
LAYER_ORDER_BYTES = 16
TOKEN_BYTES = 4

# The key of an object as storage and tiers see it: `ObjectKey.pack()`.
PackedKey = bytes


class CacheKey(Message, frozen=True):
    """The name of a request's content, as an engine sends it.

    `worker_id` is the rank, None for all ranks (the scheduler's LOOKUP). The content covers the request from its first
    token to `end`, as either `tokens` (packed u32 token ids) or `digests` (packed 32-byte chunk digests); `start`
    selects, in tokens. `start` and `end` are multiples of the namespace's chunk. `request_id` and `trace`, the W3C
    traceparent of a sampled request ("" for none), name the request; of `retain` the first that fits a chunk counts.
    `conversation` names what can be forgotten together, "" for nothing."""

    model_name: str
    world_size: int
    worker_id: int | None
    namespace: bytes
    start: int
    end: int
    request_id: str
    tokens: bytes = b""
    digests: bytes = b""
    cache_salt: str = ""
    trace: str = ""
    retain: Annotated[tuple[Retain, ...], msgspec.Meta(max_length=MAX_RETAINS)] = ()
    conversation: str = ""


class ObjectKey(NamedTuple):
    """The name of the bytes of one chunk, of one rank, of one layer group. `salt` is 16 bytes: the request's salt and
    the order of the rank's layers, see `salt_digest`."""

    namespace: bytes
    salt: bytes
    rank: int
    group: int
    digest: bytes

    def pack(self) -> PackedKey:
        """Return 72 bytes: namespace 16, salt 16, rank u32, group u32, digest 32."""
        return key_prefix(self.namespace, self.salt, self.rank, self.group) + self.digest

    @staticmethod
    def unpack(packed: PackedKey) -> ObjectKey:
        """Return the inverse of `pack`. Raises `ValueError` for another length."""
        if len(packed) != PACKED_KEY_BYTES:
            raise ValueError(f"an object key has {PACKED_KEY_BYTES} bytes, found {len(packed)}")
        rank = int.from_bytes(packed[32:36], "little")
        group = int.from_bytes(packed[36:40], "little")
        return ObjectKey(packed[:16], packed[16:32], rank, group, packed[40:])


PACKED_KEY_BYTES = NAMESPACE_BYTES + SALT_BYTES + 4 + 4 + DIGEST_BYTES


def key_prefix(namespace: bytes, salt: bytes, rank: int, group: int) -> bytes:
    """Return the bytes that all packed keys of one request, rank and group share; append a digest to get a key."""
    return namespace + salt + rank.to_bytes(4, "little") + group.to_bytes(4, "little")


def tenant_digest(salt: str) -> str:
    """Return the digest that a tenant's table contains instead of the secret salt: 32 hexadecimal digits."""
    return hashlib.sha256(b"kvf/tenant/1\0" + salt.encode()).hexdigest()[:32]


def salt_digest(cache_salt: str, layer_order: bytes = b"") -> bytes:
    """Return 16 bytes for a salt and the order of a rank's layers (b"": that of their names): zeros for neither, else
    BLAKE2b of the salt, with the order as its salt parameter. So no lookup finds objects of another order."""
    if not cache_salt and not layer_order:
        return bytes(SALT_BYTES)
    encoded = cache_salt.encode()
    return hashlib.blake2b(encoded, digest_size=SALT_BYTES, person=b"kvf-salt", salt=layer_order).digest()


def compute_namespace(
    *,
    model: str,
    desc: MemoryLayoutDesc,
    hasher_fingerprint: str,
    world_size: int,
    revision: str = "",
    quantization: str = "",
    packing: str = "",
    split: Sequence[int] = (),
) -> bytes:
    """Return 16 bytes that name everything which must be equal before two engines may share bytes: BLAKE2b-16 over the
    JSON array of model, revision, quantisation, packing (instruction-set specific order inside a block, "" for none),
    hasher fingerprint, world size, the desc, and of shards how the model is `split` (`kvframework.client.shards`)."""
    fields = [model, revision, quantization, packing, hasher_fingerprint, world_size, msgspec.to_builtins(desc)]
    if split:
        fields.append(list(split))
    encoded = msgspec.json.encode(fields, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=NAMESPACE_BYTES, person=b"kvf-ns").digest()


TRACEPARENT_CHARACTERS = 55
# Later versions may append fields behind a dash.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_LATEST = "00"
_SAMPLED = 1


def sampled_parent(traceparent: str) -> str:
    """Return the `traceparent`, 55 characters of version 00, of a request that is sampled; "" for one that is not, and
    for what is no traceparent, which W3C wants ignored."""
    found = _TRACEPARENT.match(traceparent)
    if found is None:
        return ""
    version, trace, span, flags = found.groups()
    more = traceparent[TRACEPARENT_CHARACTERS : TRACEPARENT_CHARACTERS + 1]
    known = not more if version == _LATEST else version != "ff" and more in ("", "-")
    if not known or not int(trace, 16) or not int(span, 16) or not int(flags, 16) & _SAMPLED:
        return ""
    return f"{_LATEST}-{trace}-{span}-{_SAMPLED:02x}"


MAX_RETAINS = 16
# An hour, and what "soon" means.
MAX_DURATION_S, SOON_S = 3600.0, 300.0
# Thirty days, which only tiers keep.
MAX_PROMISE_S = 30 * 86400.0
PRIORITY = 50
_MAX_TOKEN = 1 << 40
_WORDS = ("done", "soon")
_RANGE = ("start", "end")
_FIELDS = ("retain", "priority", "duration", *_RANGE)
_FORMS = '"done", "soon", seconds, or objects of ' + ", ".join(_FIELDS)

Token = Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKEN)]


class Retain(Message, frozen=True):
    """A request's hint how long its KV stays useful; see docs/hints.md. `what` "done": no request uses these
    tokens again; "keep": L1 keeps them for `duration` seconds, longest at a high `priority` (1 to 100). Tiers that can
    are to keep them for `tiers_s`, 0 for no promise.

    The hint applies to chunks that lie entirely within the tokens `[start, end)` of the prompt; `end` None: to the
    prompt's end. With `start` None it applies to the request, and "done" then only to objects that this request stores
    first: other requests may use the objects that it found."""

    what: Literal["done", "keep"]
    duration: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_DURATION_S)] = SOON_S
    priority: Annotated[int, msgspec.Meta(ge=1, le=100)] = PRIORITY
    start: Token | None = None
    end: Token | None = None
    tiers_s: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_PROMISE_S)] = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.duration <= MAX_DURATION_S:  # also for what is not a number
            raise ValueError(f"duration is {self.duration}, expected 0 to {MAX_DURATION_S:.0f} seconds")
        if not 1 <= self.priority <= 100:
            raise ValueError(f"priority is {self.priority}, expected 1 to 100")


def retain_of(value: object) -> tuple[Retain, ...]:
    """Return the hints that a user has written as JSON: "done", "soon", a number of seconds, one object of `retain`,
    `priority` (0 to 100; 0 is "done"), `duration` (seconds), `start` and `end` (tokens), or a list of them, of which
    the first that fits a chunk counts. None means no hint. Raises `RequestError`, which names what is wrong."""
    if value is None:
        return ()
    items = value if isinstance(value, (list, tuple)) else [value]
    if len(items) > MAX_RETAINS:
        raise _wrong(f"the list has {len(items)} ranges", f"at most {MAX_RETAINS}")
    return tuple(_one(item) for item in items)


def _one(item: object) -> Retain:
    fields = item if isinstance(item, Mapping) else {"retain": item}
    unknown = [key for key in fields if key not in _FIELDS]
    if unknown:
        raise _wrong(f"unknown field {str(unknown[0])[:40]!r}", ", ".join(_FIELDS))
    start, end = (_whole(fields, name, _MAX_TOKEN, "tokens, counted from the prompt's start") for name in _RANGE)
    priority, duration = _whole(fields, "priority", 100, "0 to 100"), fields.get("duration")
    what: Literal["done", "keep"] = "done" if priority == 0 else "keep"
    if "retain" in fields:
        if priority is not None or duration is not None:
            raise _wrong("retain is set together with priority or duration", "either retain, or priority and duration")
        duration = fields["retain"]
        if isinstance(duration, str):
            if duration not in _WORDS:
                raise _wrong(f"unknown word {duration[:40]!r}", _FORMS)
            what, duration = ("done" if duration == "done" else "keep"), SOON_S
        duration = _seconds(duration)
    elif priority is None and duration is None:
        raise _wrong("the object sets no hint", "retain, priority or duration")
    if end is not None:
        start = start or 0
        if end <= start:
            raise _wrong(f"end is {end}", f"a token after start, which is {start}")
    if what == "done":
        return Retain(what, start=start, end=end)
    seconds = SOON_S if duration is None else _seconds(duration)
    tiers_s = seconds if seconds > MAX_DURATION_S else 0.0
    return Retain(what, min(seconds, MAX_DURATION_S), PRIORITY if priority is None else priority, start, end, tiers_s)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= MAX_PROMISE_S:
        raise _wrong(repr(value)[:40], f'"done", "soon", or 0 to {MAX_PROMISE_S:.0f} seconds')
    return float(value)


def _whole(fields: Mapping[str, object], name: str, most: int, expected: str) -> int | None:
    value = fields.get(name)
    if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most):
        raise _wrong(f"{name} is {repr(value)[:40]}", expected)
    return value


def _wrong(fact: str, expected: str) -> RequestError:
    hint = "see https://github.com/kvframework/kvframework/tree/main/docs/hints.md"
    return RequestError(fact, where="retain", available=expected, hint=hint)


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
    say to routers what the extras mean: a chunk with an extra and without either is not announced."""

    tokens: bytes
    extras: Annotated[tuple[Extra, ...], msgspec.Meta(max_length=MAX_EXTRAS)] = ()
    block_size: int = 0
    hashes: bytes = b""
    images: Annotated[tuple[Image, ...], msgspec.Meta(max_length=MAX_EXTRAS)] = ()
    lora_name: Name = ""

    def problem(self, tokens: int, chunk_tokens: int) -> str:
        """Return what is wrong with it as the content of `tokens` tokens, "" for nothing."""
        if len(self.tokens) != tokens * 4:
            return f"the token ids have {len(self.tokens)} bytes, 4 for each of {tokens} tokens are expected"
        if self.block_size < 0 or bool(self.block_size) != bool(self.hashes):
            return f"the block size is {self.block_size}, and the block hashes have {len(self.hashes)} bytes"
        if self.block_size and len(self.hashes) * self.block_size != tokens * HASH_BYTES:
            return f"{len(self.hashes)} bytes of block hashes, for {tokens} tokens in blocks of {self.block_size}"
        if any(not 0 <= each.chunk < tokens // chunk_tokens for each in self.extras):
            return f"an extra names a chunk outside of the {tokens} tokens"
        return ""
