"""The Zstandard codec. Contexts of the library are not thread-safe, so each storage thread has its own.

No block as large as an object is asked of malloc: glibc would keep it after it is freed, for each thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import zstandard

from kvframework.api.codec import Codec
from kvframework.api.copying import copy_bytes, fresh_memory

# What is packed comes out in parts of so many bytes.
_PART = 1 << 17
_BLOCK_HEADER = 3
_RLE = 1
_CHECKSUM = 4
# No compressor makes many blocks that hold fewer bytes of an object and are shorter than this.
_HELD_IN_BLOCK = 4096
_LEAST_BLOCK = 64


class _Contexts(threading.local):
    """The contexts of one thread: created at its first use, freed at its end."""

    def __init__(self, level: int) -> None:
        # The checksum covers the unpacked bytes: without it a flipped bit may unpack to as many other bytes.
        self.compressor = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=True)
        self.decompressor = zstandard.ZstdDecompressor()


class ZstdCodec(Codec):
    """One frame per object, with its size and a checksum; nothing at all for an empty object.

    Allocates the packed bytes in `encode`, and nothing that grows with the object in `decode_into`: what a frame says
    of its size and its length is compared before it is unpacked."""

    name = "zstd"

    def __init__(self, level: int) -> None:
        self._contexts = _Contexts(level)

    def encode(self, data: memoryview) -> Sequence[memoryview]:
        if not data.nbytes:
            return []
        # Beyond what noise becomes: longer by three bytes a block.
        packed = fresh_memory(data.nbytes + (data.nbytes >> 8) + 1024)
        end = 0
        for part in _frame(self._contexts.compressor, data):
            copy_bytes(packed[end : end + len(part)], part)
            end += len(part)
        return [packed[:end].toreadonly()]

    def decode_into(self, packed: memoryview, out: memoryview) -> None:
        if not (packed.nbytes and out.nbytes):
            # The library would not detect bytes behind an empty frame.
            if packed.nbytes or out.nbytes:
                raise ValueError(f"the packed form has {packed.nbytes} bytes, too many for an object of {out.nbytes}")
            return
        try:
            size = zstandard.frame_content_size(packed)
            if size != out.nbytes:
                raise ValueError(f"the Zstandard frame unpacks to {size} bytes, expected {out.nbytes}")
            length = _frame_length(packed, size)
            if length != packed.nbytes:
                raise ValueError(f"the Zstandard frame has {length} bytes, expected {packed.nbytes}")
            # A whole frame into room for all of it: the library unpacks it at once, without a separate window.
            with self._contexts.decompressor.stream_reader(packed) as reader:
                found = reader.readinto(out)
            if found != out.nbytes:
                raise ValueError(f"the Zstandard frame unpacked to {found} bytes, expected {out.nbytes}")
        except zstandard.ZstdError as error:
            raise ValueError(f"the Zstandard frame is damaged: {error}") from error


def _frame(compressor: zstandard.ZstdCompressor, data: memoryview) -> Iterator[bytes]:
    chunker = compressor.chunker(size=data.nbytes, chunk_size=_PART)
    yield from chunker.compress(data)
    yield from chunker.finish()  # type: ignore[no-untyped-call]


def _frame_length(packed: memoryview, held: int) -> int:
    """Return the length of the frame that begins here and holds `held` bytes, by the headers of its blocks. Raises
    `ValueError` for one that is cut off or has a flood of blocks, `ZstdError` for none."""
    checksum = _CHECKSUM if zstandard.get_frame_parameters(packed).has_checksum else 0
    at = zstandard.frame_header_size(packed)
    for _ in range(1 + held // _HELD_IN_BLOCK + packed.nbytes // _LEAST_BLOCK):
        header = int.from_bytes(packed[at : at + _BLOCK_HEADER], "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        at += _BLOCK_HEADER + (1 if kind == _RLE else size)
        if at + checksum > packed.nbytes:
            raise ValueError(f"the Zstandard frame is cut off after {packed.nbytes} bytes")
        if last:
            return at + checksum
    raise ValueError("the Zstandard frame has too many blocks")
