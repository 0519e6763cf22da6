"""Names of values on disk, and the format of their files. Pure.

A file is a head of 16 bytes (magic `KVFF`, format u16, start u16, bytes of the value u64; little-endian), a gap, and
the value from `start` on. The start of a large value is such that its bulk, which follows the small parts at its front,
begins on a page boundary and can be moved without the page cache. The file of a large value is padded to a fixed
overhead, so that the size of a file alone determines the size of its value.
"""

from __future__ import annotations

import errno
import re
import struct
from collections.abc import Sequence

from kvframework.api.keys import PACKED_KEY_BYTES, PackedKey

FORMAT = 1
FOLDERS = 256
PAGE = 4096

# Bypassing the page cache pays from this size on: README.md has the figures.
LARGE = 1 << 20

_HEAD = struct.Struct("<4sHHQ")
_MAGIC = b"KVFF"
HEAD_BYTES = _HEAD.size
_LARGE_OVERHEAD = HEAD_BYTES + PAGE

_NAME = re.compile(rf"[0-9a-f]{{{2 * PACKED_KEY_BYTES}}}")
_TEMPORARY = re.compile(r"\.([0-9a-f]{16})-\d+\.tmp")
# The kernel's errors where a file system, or the required alignment, does not allow direct I/O.
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


def folder_name(folder: int) -> str:
    return f"{folder:02x}"


def folder_of(key: PackedKey) -> int:
    """The folder of a key, by the key's last byte, which is a digest's: the first bytes are the same for all objects of
    a model."""
    return key[-1]


def place_of(key: PackedKey) -> tuple[int, str]:
    """The folder and the name in it. Raises `ValueError` for bytes that are no packed key."""
    if len(key) != PACKED_KEY_BYTES:
        raise ValueError(f"an object key has {PACKED_KEY_BYTES} bytes, found {len(key)}")
    return folder_of(key), key.hex()


def path_of(key: PackedKey) -> str:
    """The path below the root, for people and tests: the tier opens each part of it by itself."""
    folder, name = place_of(key)
    return f"{folder_name(folder)}/{name}"


def key_of(folder: int, name: str) -> PackedKey | None:
    """The key of a file in `folder`; None if the name is not one of this tier's."""
    if _NAME.fullmatch(name) is None:
        return None
    key = bytes.fromhex(name)
    return key if folder_of(key) == folder else None


def temporary_name(token: str, number: int) -> str:
    """The name of a temporary file. `token`: 16 hex digits that no other tier has, in this process or another."""
    return f".{token}-{number}.tmp"


def token_of(name: str) -> str | None:
    """The token of a temporary file's name; None for any other name."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else None


def lead_bytes(parts: Sequence[memoryview]) -> int:
    """Bytes of the small parts before the first that is at least a page long; 0 if there is none."""
    lead = 0
    for part in parts:
        if part.nbytes >= PAGE:
            return lead
        lead += part.nbytes
    return 0


def start_for(nbytes: int, lead: int) -> int:
    """The offset of a value of `nbytes` in its file."""
    return HEAD_BYTES if nbytes < LARGE else HEAD_BYTES + -(HEAD_BYTES + lead) % PAGE


def file_bytes(nbytes: int) -> int:
    """Size of the file of a value of `nbytes`."""
    return nbytes + (HEAD_BYTES if nbytes < LARGE else _LARGE_OVERHEAD)


def value_bytes(size: int) -> int | None:
    """Bytes of the value in a file of `size` bytes, None if no value's file has this size."""
    small, large = size - HEAD_BYTES, size - _LARGE_OVERHEAD
    if large >= LARGE:
        return large
    return small if 0 <= small < LARGE else None


def counted_bytes(size: int) -> int:
    """The bytes that a file of `size` bytes adds to the count: its value, or all of it if it is damaged."""
    nbytes = value_bytes(size)
    return size if nbytes is None else nbytes


def pack_head(start: int, nbytes: int) -> bytes:
    return _HEAD.pack(_MAGIC, FORMAT, start, nbytes)


def start_in(head: bytes, nbytes: int) -> int | None:
    """The offset of the value according to the head of a file that should hold `nbytes`; None if the head says
    otherwise."""
    magic, version, start, object_bytes = _HEAD.unpack(head)
    if magic != _MAGIC or version != FORMAT or object_bytes != nbytes or start < HEAD_BYTES:
        return None
    return int(start)
