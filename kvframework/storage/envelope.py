"""Owns the format of a value in L2: a fixed header, then the object's bytes. Pure.

Header, 64 bytes, little-endian: magic `KVFO`, format version u16, 2 reserved bytes (zero), namespace 16, codec name 16
(ASCII, zero padded), bytes of the object u64, bytes that follow u64, XXH3-64 u64. The checksum covers the packed
object key and the bytes that follow, so that a value under another's key is as wrong as a flipped bit.
"""

from __future__ import annotations

import struct

import xxhash

from kvframework.api import Buffer, PackedKey

FORMAT_VERSION = 1
_MAGIC = b"KVFO"
_HEADER = struct.Struct("<4sHH16s16sQQQ")
HEADER_BYTES = _HEADER.size
_NO_CODEC = b"none".ljust(16, b"\0")


def seal(key: PackedKey, payload: Buffer) -> bytes:
    """The header for a value that holds `payload` as it is (codec `none`)."""
    size = memoryview(payload).nbytes
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, key[:16], _NO_CODEC, size, size, _checksum(key, payload))


def defect(header: Buffer, key: PackedKey, payload: Buffer) -> str | None:
    """What is wrong with a value that was read, None if nothing is."""
    if memoryview(header).nbytes != HEADER_BYTES:
        return "no envelope"
    magic, version, reserved, namespace, name, object_bytes, size, checksum = _HEADER.unpack(header)
    found = memoryview(payload).nbytes
    if magic != _MAGIC:
        return "no envelope"
    if version != FORMAT_VERSION or reserved:
        return f"format version {version}, expected {FORMAT_VERSION}"
    if namespace != key[:16]:
        return "another namespace"
    if name != _NO_CODEC:
        return f"codec {name!r}, expected none"
    if size != found or object_bytes != found:
        return f"{size} bytes, expected {found}"
    if checksum != _checksum(key, payload):
        return "wrong checksum"
    return None


def _checksum(key: PackedKey, payload: Buffer) -> int:
    digest = xxhash.xxh3_64(key)
    digest.update(payload)
    return digest.intdigest()
