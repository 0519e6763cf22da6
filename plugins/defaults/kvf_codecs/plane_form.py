"""The packed form of the `planes` codec. Pure.

An object is cut into pieces of `PIECE` elements; the last one is what is left. Byte i of each element of a piece is
its plane i, which is held as a Zstandard frame, or as it is where that is not smaller.

Little-endian: version u8, bytes of an element u8 (0: the object's own bytes follow, as they are), 6 zero bytes, bytes
of the object u64, XXH3-64 of the object u64; then the length u32 of each plane as held, piece by piece; then these
planes; then the bytes behind the last whole element. A plane held as it is has a byte for each element.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

VERSION = 1
# Of one element in bytes.
WIDTHS = (1, 2, 4, 8)
# Planes of so many bytes stay in the processor's caches from one step to the next.
PIECE = 1 << 18

_HEADER = struct.Struct("<BB6xQQ")
HEADER_BYTES = _HEADER.size


class Piece(NamedTuple):
    """`at`: its place in the object, in bytes."""

    at: int
    elements: int


class Header(NamedTuple):
    """`width` 0: not in planes."""

    width: int
    nbytes: int
    checksum: int

    def packed(self) -> bytes:
        return _HEADER.pack(VERSION, self.width, self.nbytes, self.checksum)


def pieces(nbytes: int, width: int) -> Iterator[Piece]:
    """Yield the pieces of an object, without the bytes behind its last whole element."""
    elements = nbytes // width
    for first in range(0, elements, PIECE):
        yield Piece(first * width, min(PIECE, elements - first))


def table_of(lengths: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(lengths)}I", *lengths)


def table_bytes(nbytes: int, width: int) -> int:
    return -(-(nbytes // width) // PIECE) * width * 4


def read_header(packed: memoryview, nbytes: int) -> Header:
    """Return the header of the packed form of an object that has `nbytes`. Raises `ValueError`."""
    if packed.nbytes < HEADER_BYTES:
        raise ValueError(f"{packed.nbytes} packed bytes, expected a header of {HEADER_BYTES}")
    version, width, stated, checksum = _HEADER.unpack_from(packed)
    header = Header(width, stated, checksum)
    if version != VERSION:
        raise ValueError(f"form version {version}, expected {VERSION}")
    if stated != nbytes:
        raise ValueError(f"an object of {stated} bytes, expected {nbytes}")
    if width not in (0, *WIDTHS) or packed[2:8] != bytes(6):
        raise ValueError(f"elements of {width} bytes, expected {', '.join(map(str, WIDTHS))}")
    return header


def read_table(packed: memoryview, header: Header) -> Sequence[int]:
    """Return the length of each plane as held. Raises `ValueError` unless together they are what follows."""
    size = table_bytes(header.nbytes, header.width)
    start = HEADER_BYTES + size
    if packed.nbytes < start:
        raise ValueError(f"{packed.nbytes} packed bytes, expected a table up to byte {start}")
    lengths = struct.unpack_from(f"<{size // 4}I", packed, HEADER_BYTES)
    whole = start + sum(lengths) + header.nbytes % header.width
    if packed.nbytes != whole:
        raise ValueError(f"{packed.nbytes} packed bytes, expected {whole}")
    return lengths
