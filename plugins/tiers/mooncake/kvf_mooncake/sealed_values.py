"""A value as it is kept in Mooncake: its bytes, and behind them a checksum of them and their key. Pure.

Mooncake has no empty values. It overwrites a value in place while others read it, and gives the place of a deleted one
to another: what was read meanwhile is of two values, which shows here.
"""

from __future__ import annotations

import xxhash

from kvframework.api.keys import PackedKey

SEAL_BYTES = 8


def seal(key: PackedKey, room: memoryview) -> None:
    """Write the checksum into the last `SEAL_BYTES` of `room`, behind the value."""
    room[-SEAL_BYTES:] = _checksum(key, room[:-SEAL_BYTES])


def broken_seal(key: PackedKey, kept: memoryview) -> bytes | None:
    """Return None for a value as it was kept whole, else the checksum of what is there instead of it."""
    if kept.nbytes < SEAL_BYTES:
        return bytes(kept)
    found = _checksum(key, kept[:-SEAL_BYTES])
    return None if found == kept[-SEAL_BYTES:] else found + bytes(kept[-SEAL_BYTES:])


def _checksum(key: PackedKey, value: memoryview) -> bytes:
    digest = xxhash.xxh3_64(key)
    digest.update(value)
    return digest.digest()
