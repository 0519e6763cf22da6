"""The Zstandard codec. Contexts of the library are not thread-safe, so each storage thread has its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import zstandard

from kvframework.api.codec import Codec
from kvframework.api.copying import copy_bytes


class _Contexts(threading.local):
    """The contexts of one thread: created at its first use, freed at its end."""

    def __init__(self, level: int) -> None:
        # The checksum covers the unpacked bytes: without it a flipped bit may unpack to as many other bytes.
        self.compressor = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=True)
        self.decompressor = zstandard.ZstdDecompressor()


class ZstdCodec(Codec):
    """One frame per object, with its size and a checksum; nothing at all for an empty object.

    Allocates the packed bytes in `encode`, and in `decode_into` as many bytes as `out` has, never more: the size in a
    frame is compared before anything is allocated for it.
    """

    name = "zstd"

    def __init__(self, level: int) -> None:
        self._contexts = _Contexts(level)

    def encode(self, data: memoryview) -> Sequence[memoryview]:
        return [memoryview(self._contexts.compressor.compress(data))] if data.nbytes else []

    def decode_into(self, packed: memoryview, out: memoryview) -> None:
        if not (packed.nbytes and out.nbytes):
            # The library would not detect bytes behind an empty frame.
            if packed.nbytes or out.nbytes:
                raise ValueError(f"{packed.nbytes} packed bytes for an object of {out.nbytes}")
            return
        try:
            size = zstandard.frame_content_size(packed)
            if size != out.nbytes:
                raise ValueError(f"a frame of {size} bytes, expected {out.nbytes}")
            copy_bytes(out, self._contexts.decompressor.decompress(packed, allow_extra_data=False))
        except zstandard.ZstdError as error:
            raise ValueError(f"no whole Zstandard frame: {error}") from error
