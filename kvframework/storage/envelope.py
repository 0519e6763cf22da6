"""The format of a value in L2: a fixed header, then the object's bytes as its codec packed them. Pure.

Header, 80 bytes, little-endian: magic `KVFO`, format version u16, 2 reserved bytes (zero), namespace 16, layout desc 16
(`layout_fingerprint`, zero if unknown), codec name 16 (ASCII, zero padded), bytes of the object u64, bytes that follow
u64, XXH3-64 u64. The checksum covers the packed object key, the header before the checksum, and the bytes that follow,
so that a value under the wrong key is detected like a flipped bit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from kvframework.api.codec import MAX_CODEC_NAME, NO_CODEC
from kvframework.api.keys import PackedKey
from kvframework.api.layout import MemoryLayoutDesc
from kvframework.api.plugin import Buffer

FORMAT_VERSION = 2
UNKNOWN_LAYOUT = bytes(16)

_MAGIC = b"KVFO"
_FIELDS = struct.Struct("<4sHH16s16s16sQQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class Damaged(ValueError):
    """The bytes read are not those that were stored under this key."""


def layout_fingerprint(desc: MemoryLayoutDesc) -> bytes:
    """16 bytes that identify the layout of a namespace's objects: XXH3-128 of the fields of `desc`."""
    groups = [f"{group.form} {group.dtype} {group.shape} {group.window}" for group in desc.groups]
    return xxhash.xxh3_128_digest("\n".join([str(desc.chunk_tokens), *groups]).encode())


def checksum_in(header: bytes) -> int:
    """Return the checksum that a header of `seal` holds."""
    return int(_CHECKSUM.unpack_from(header, _FIELDS.size)[0])


def object_checksum(key: PackedKey, value: memoryview, layout: bytes) -> int:
    """Return the checksum that `seal` writes for an object that no codec packs."""
    return checksum_in(seal(key, [value], object_bytes=value.nbytes, layout=layout))


def seal(
    key: PackedKey,
    packed: Sequence[Buffer],
    *,
    object_bytes: int,
    codec: str = NO_CODEC,
    layout: bytes = UNKNOWN_LAYOUT,
) -> bytes:
    """Return the header to store before `packed`."""
    size = sum([memoryview(part).nbytes for part in packed])
    name = codec.encode("ascii").ljust(MAX_CODEC_NAME, b"\0")
    fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, 0, key[:16], layout, name, object_bytes, size)
    return fields + _CHECKSUM.pack(_checksum(key, fields, packed))


def unseal(
    header: Buffer, key: PackedKey, place: memoryview, *, received: int, layout: bytes = UNKNOWN_LAYOUT
) -> tuple[str, memoryview]:
    """Return the codec's name, and the beginning of `place` that holds the packed bytes. `received` bytes of the value
    were read into header and place together; bytes behind them are from earlier use.

    `place` is as long as the object; no packed form is longer. Raises `Damaged`.
    """
    if memoryview(header).nbytes != HEADER_BYTES or received < HEADER_BYTES:
        raise Damaged("no envelope")
    fields = bytes(header)[: _FIELDS.size]
    magic, version, reserved, namespace, written, name, object_bytes, size = _FIELDS.unpack(fields)
    if magic != _MAGIC:
        raise Damaged("no envelope")
    if version != FORMAT_VERSION or reserved:
        raise Damaged(f"format version {version}, expected {FORMAT_VERSION}")
    if namespace != key[:16]:
        raise Damaged("another namespace")
    if UNKNOWN_LAYOUT not in (written, layout) and written != layout:
        raise Damaged("another object layout")
    if object_bytes != place.nbytes or size > place.nbytes:
        raise Damaged(f"{object_bytes} bytes in {size}, expected {place.nbytes}")
    if received != HEADER_BYTES + size:
        raise Damaged(f"{received - HEADER_BYTES} of {size} bytes behind the header")
    packed = place[:size]
    if _CHECKSUM.unpack_from(header, _FIELDS.size)[0] != _checksum(key, fields, [packed]):
        raise Damaged("wrong checksum")
    codec = name.rstrip(b"\0").decode("ascii", "replace")
    if codec == NO_CODEC and size != object_bytes:
        raise Damaged(f"{size} bytes, expected {object_bytes}")
    return codec, packed


def _checksum(key: PackedKey, fields: bytes, packed: Sequence[Buffer]) -> int:
    digest = xxhash.xxh3_64(key)
    digest.update(fields)
    for part in packed:
        digest.update(part)
    return digest.intdigest()
