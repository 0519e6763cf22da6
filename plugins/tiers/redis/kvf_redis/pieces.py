"""The format of a value above the maximum size: its pieces, and the trailers that tie them together. Pure.

Piece 0 lies under the value's own key, the others under keys that name one write of the value, and each ends with a
trailer that names that write too. Piece 0 is written last: until then the value is absent, or is still the old one. A
reader takes the trailer of piece 0 and accepts no piece with a different one. A whole value that happens to end like a
trailer is stored as pieces, too.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

_TRAILER = struct.Struct("<16s16sQII")
_MAGIC = b"\xa7kvf pieces 1\r\n\xf3"
TRAILER_BYTES = _TRAILER.size

# More than any writer makes: bounds the work that a forged trailer can cause.
MAX_PIECES = 1 << 16


class Trailer(NamedTuple):
    """The end of each piece. `generation` is random and names one write of `total` bytes in `pieces` pieces."""

    generation: bytes
    total: int
    pieces: int

    def fits(self, first_bytes: int, least: int) -> bool:
        """True if a piece 0 with `first_bytes` of the value may have this trailer; no writer makes pieces that hold
        less than `least`."""
        if self.pieces == 1:
            return self.total == first_bytes
        return first_bytes >= max(least, 1) and len(spans(self.total, first_bytes)) == self.pieces

    def bytes_of(self, index: int) -> bytes:
        """The bytes at the end of piece `index`."""
        return _TRAILER.pack(_MAGIC, self.generation, self.total, self.pieces, index)


def parse_trailer(tail: bytes) -> Trailer | None:
    """The trailer of a piece 0 that ends with `tail`. None: the value is no piece 0."""
    if len(tail) != TRAILER_BYTES or not tail.startswith(_MAGIC):
        return None
    _, generation, total, count, index = _TRAILER.unpack(tail)
    return Trailer(generation, total, count) if index == 0 and 0 < count <= MAX_PIECES else None


def new_trailer(total: int, piece_bytes: int) -> Trailer | None:
    """A trailer for a new write in pieces that hold `piece_bytes` of the value each. None: too many pieces."""
    count = len(spans(total, piece_bytes))
    return Trailer(os.urandom(16), total, count) if count <= MAX_PIECES else None


def spans(total: int, piece_bytes: int) -> range:
    """The offset of each piece in the value, where each but the last holds `piece_bytes` of it."""
    return range(0, total, piece_bytes or 1)


def piece_key(key: bytes, trailer: Trailer, index: int) -> bytes:
    """The key of piece `index` (1 or more) of the value under `key`; in a cluster it has a slot of its own."""
    return b"%b:%b:%d" % (key, trailer.generation.hex().encode(), index)
