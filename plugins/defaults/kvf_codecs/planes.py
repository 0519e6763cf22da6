"""The codec `planes`: an object's elements as byte planes, of which those that shrink are Zstandard frames.

Sign and exponent of floating-point numbers shrink to a third, once they lie apart from the mantissas, which are noise.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import xxhash
import zstandard

from kvf_codecs.plane_choice import choose
from kvf_codecs.plane_form import (
    HEADER_BYTES,
    PIECE,
    Header,
    Piece,
    pieces,
    read_header,
    read_table,
    table_bytes,
    table_of,
)
from kvf_codecs.plane_kernel import PlaneKernel, load_kernel
from kvframework.api.codec import Codec
from kvframework.api.copying import copy_bytes, fresh_memory
from kvframework.api.types import DTYPE_BYTES, Buffer

# The bytes that an element may have, by its dtype.
_WIDTHS = {dtype: (width,) for dtype, width in DTYPE_BYTES.items()}


class _Contexts(threading.local):
    """What one thread packs with, created at its first use, freed at its end: 2 MB for 2-byte elements."""

    def __init__(self) -> None:
        # Exponents hardly repeat: nearly all of the gain is their entropy. With the shortest table of matches packing
        # takes half of the time of level 1, and loses nothing.
        self.compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST,
                window_log=PIECE.bit_length() - 1,
                hash_log=6,
                chain_log=6,
                min_match=7,
                write_content_size=True,
            )
        )
        self.decompressor = zstandard.ZstdDecompressor()
        self.planes: list[memoryview] = []

    def rooms(self, width: int) -> list[memoryview]:
        """Return room for a plane of a piece, for each byte of an element."""
        while len(self.planes) < width:
            self.planes.append(memoryview(bytearray(PIECE)))
        return self.planes[:width]


class PlanesCodec(Codec):
    """One form for all kernels (`plane_form.py`). Without a dtype a sample tells the width of an element.

    Allocates the packed bytes in `encode`, and nothing that grows with the object in `decode_into`.
    """

    name = "planes"

    def __init__(self, kernel: PlaneKernel | None = None) -> None:
        self._kernel = kernel or load_kernel()
        self._contexts = _Contexts()

    def encode(self, data: memoryview) -> Sequence[memoryview]:
        return self.encode_elements(data, "")

    def encode_elements(self, data: memoryview, dtype: str) -> Sequence[memoryview]:
        """At most 24 bytes longer than `data`."""
        choice = choose(data, _WIDTHS.get(dtype, (1, 2, 4)), self._kernel, self._packed_bytes)
        start = HEADER_BYTES + table_bytes(data.nbytes, choice.width)
        if any(choice.shrinks) and start < data.nbytes:
            packed = self._in_planes(data, choice.width, choice.shrinks, start)
            if packed.nbytes < data.nbytes:
                return [packed]
        header = Header(0, data.nbytes, xxhash.xxh3_64_intdigest(data))
        return [memoryview(header.packed()), data] if data.nbytes else [memoryview(header.packed())]

    def decode_into(self, packed: memoryview, out: memoryview) -> None:
        header = read_header(packed, out.nbytes)
        digest = xxhash.xxh3_64()
        if header.width == 0:
            if packed.nbytes != HEADER_BYTES + out.nbytes:
                raise ValueError(f"{packed.nbytes} packed bytes, expected {HEADER_BYTES + out.nbytes}")
            copy_bytes(out, packed[HEADER_BYTES:])
            digest.update(out)
        else:
            self._merge(packed, header, out, digest)
        if digest.intdigest() != header.checksum:
            raise ValueError("the unpacked bytes have another checksum")

    def _packed_bytes(self, plane: memoryview) -> int:
        return len(self._contexts.compressor.compress(plane)) if plane.nbytes else 0

    def _in_planes(self, data: memoryview, width: int, shrinks: Sequence[bool], at: int) -> memoryview:
        """Return the packed form, whose planes begin at byte `at`. No plane is held longer than it is."""
        packed = fresh_memory(at + data.nbytes)
        rooms = self._contexts.rooms(width)
        lengths: list[int] = []
        digest = xxhash.xxh3_64()
        for piece in pieces(data.nbytes, width):
            elements = data[piece.at : piece.at + piece.elements * width]
            planes = [room[: piece.elements] for room in rooms]
            self._kernel.split(elements, planes)
            digest.update(elements)
            for plane, shrink in zip(planes, shrinks, strict=True):
                held = self._held(plane, shrink)
                length = memoryview(held).nbytes
                copy_bytes(packed[at : at + length], held)
                lengths.append(length)
                at += length
        rest = data[data.nbytes - data.nbytes % width :]
        digest.update(rest)
        packed[at : at + rest.nbytes] = rest
        header = Header(width, data.nbytes, digest.intdigest()).packed() + table_of(lengths)
        packed[: len(header)] = header
        return packed[: at + rest.nbytes].toreadonly()

    def _held(self, plane: memoryview, shrink: bool) -> Buffer:
        """Return the shorter of a plane and its frame."""
        if shrink:
            frame = self._contexts.compressor.compress(plane)
            if len(frame) < plane.nbytes:
                return frame
        return plane

    def _merge(self, packed: memoryview, header: Header, out: memoryview, digest: xxhash.xxh3_64) -> None:
        lengths = iter(read_table(packed, header))
        at = HEADER_BYTES + table_bytes(header.nbytes, header.width)
        for piece in pieces(header.nbytes, header.width):
            planes: list[Buffer] = []
            for _ in range(header.width):
                end = at + next(lengths)
                planes.append(self._plane(packed[at:end], piece))
                at = end
            elements = out[piece.at : piece.at + piece.elements * header.width]
            self._kernel.merge(planes, elements)
            digest.update(elements)
        rest = packed.nbytes - at
        out[out.nbytes - rest :] = packed[at:]
        digest.update(packed[at:])

    def _plane(self, held: memoryview, piece: Piece) -> Buffer:
        """Return a plane of a piece: a view of `held`, or at most `PIECE` new bytes. Raises `ValueError`."""
        if held.nbytes == piece.elements:
            return held
        if held.nbytes > piece.elements:
            raise ValueError(f"a plane held in {held.nbytes} bytes, expected at most {piece.elements}")
        try:
            size = zstandard.frame_content_size(held)
            if size != piece.elements:
                raise ValueError(f"a plane of {size} bytes, expected {piece.elements}")
            return self._contexts.decompressor.decompress(held, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(f"no whole Zstandard frame: {error}") from error
