"""Names of content: cache keys as engines send them, object keys as storage uses them, and namespaces.

Pure functions and structs; every byte format here is little-endian and part of the stable protocol.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from kvframework.api.layout import MemoryLayoutDesc
from kvframework.api.retain import MAX_RETAINS, Retain
from kvframework.api.types import Message

__all__ = ["DIGEST_BYTES", "PACKED_KEY_BYTES", "TOKEN_BYTES", "CacheKey", "PackedKey", "Retain"]

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
    token to `end`, in exactly one form: `tokens` (packed u32 token ids) or `digests` (packed 32-byte chunk digests);
    `start` selects, in tokens. `start` and `end` are multiples of the namespace's chunk. Beside the name, `request_id`
    and `trace`, the W3C traceparent of a sampled request ("" for none), say who asks, and `retain` for how long its
    content is of use: the first that fits a chunk counts.
    """

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


class ObjectKey(NamedTuple):
    """The name of the bytes of one chunk, of one rank, of one layer group. `salt` is 16 bytes: the request's salt and
    the order of the rank's layers, see `salt_digest`."""

    namespace: bytes
    salt: bytes
    rank: int
    group: int
    digest: bytes

    def pack(self) -> PackedKey:
        """Returns 72 bytes: namespace 16, salt 16, rank u32, group u32, digest 32."""
        return key_prefix(self.namespace, self.salt, self.rank, self.group) + self.digest

    @staticmethod
    def unpack(packed: PackedKey) -> ObjectKey:
        """Returns the inverse of `pack`. Raises `ValueError` for another length."""
        if len(packed) != PACKED_KEY_BYTES:
            raise ValueError(f"an object key has {PACKED_KEY_BYTES} bytes, found {len(packed)}")
        rank = int.from_bytes(packed[32:36], "little")
        group = int.from_bytes(packed[36:40], "little")
        return ObjectKey(packed[:16], packed[16:32], rank, group, packed[40:])


PACKED_KEY_BYTES = NAMESPACE_BYTES + SALT_BYTES + 4 + 4 + DIGEST_BYTES


def key_prefix(namespace: bytes, salt: bytes, rank: int, group: int) -> bytes:
    """Returns the bytes that all packed keys of one request, rank and group share; append a digest to get a key."""
    return namespace + salt + rank.to_bytes(4, "little") + group.to_bytes(4, "little")


def salt_digest(cache_salt: str, layer_order: bytes = b"") -> bytes:
    """Returns 16 bytes for a salt and the order of a rank's layers (b"": that of their names): zeros for neither, else
    BLAKE2b of the salt, with the order as its salt parameter. So a lookup under one order never finds objects of
    another."""
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
    """Returns 16 bytes that name everything which must be equal before two engines may share bytes.

    BLAKE2b-16 over the JSON array of: model, revision, quantisation, packing (instruction-set specific order inside a
    block, "" for none), hasher fingerprint, world size, the desc (chunk size, shapes, dtypes, forms, windows), and of
    objects that are shards of the whole model how it is `split`, see `kvframework.client.shards`.
    """
    fields = [model, revision, quantization, packing, hasher_fingerprint, world_size, msgspec.to_builtins(desc)]
    if split:
        fields.append(list(split))
    encoded = msgspec.json.encode(fields, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=NAMESPACE_BYTES, person=b"kvf-ns").digest()
