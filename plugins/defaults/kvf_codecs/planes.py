"""The codec `planes`: an object's elements as byte planes, of which those that shrink are Zstandard frames.

Sign and exponent of floating-point numbers shrink to a third, once they lie apart from the mantissas, which are noise.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import xxhash
import zstandard

from kvf_codecs.plane_kernel import PlaneKernel, load_kernel
from kvframework.api.codec import Codec
from kvframework.api.copying import copy_bytes, fresh_memory
from kvframework.api.plugin import DTYPE_BYTES, Buffer

# The packed form of the `planes` codec. Pure.
#
# An object is cut into pieces of `PIECE` elements; the last one is what is left. Byte i of each element of a piece is
# its plane i, which is held as a Zstandard frame, or as it is where that is not smaller.
#
# Little-endian: version u8, bytes of an element u8 (0: the object's own bytes follow, as they are), 6 zero bytes, bytes
# of the object u64, XXH3-64 of the object u64; then the length u32 of each plane as held, piece by piece; then these
# planes; then the bytes behind the last whole element. A plane held as it is has a byte for each element.

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
        raise ValueError(f"the packed form has {packed.nbytes} bytes, fewer than its header of {HEADER_BYTES}")
    version, width, stated, checksum = _HEADER.unpack_from(packed)
    header = Header(width, stated, checksum)
    if version != VERSION:
        raise ValueError(f"the packed form has version {version}, expected {VERSION}")
    if stated != nbytes:
        raise ValueError(f"the packed object has {stated} bytes, expected {nbytes}")
    if width not in (0, *WIDTHS) or packed[2:8] != bytes(6):
        raise ValueError(f"the elements have {width} bytes, expected {', '.join(map(str, WIDTHS))}")
    return header


def read_table(packed: memoryview, header: Header) -> Sequence[int]:
    """Return the length of each plane as held. Raises `ValueError` unless together they are what follows."""
    size = table_bytes(header.nbytes, header.width)
    start = HEADER_BYTES + size
    if packed.nbytes < start:
        raise ValueError(f"the packed form has {packed.nbytes} bytes, but its table ends at byte {start}")
    lengths = struct.unpack_from(f"<{size // 4}I", packed, HEADER_BYTES)
    whole = start + sum(lengths) + header.nbytes % header.width
    if packed.nbytes != whole:
        raise ValueError(f"the packed form has {packed.nbytes} bytes, expected {whole}")
    return lengths


# The sample is this part of an object, but not less than `LEAST` nor more than `MOST` bytes of it.
_PART = 32
_LEAST = 16 << 10
_MOST = 128 << 10
_RUNS = 16
# A plane that shrinks by less than this part is not worth the time.
_WORTH = 32


class Choice(NamedTuple):
    """`shrinks[i]`: whether plane i is worth packing."""

    width: int
    shrinks: Sequence[bool]


def choose(
    data: memoryview, widths: Sequence[int], kernel: PlaneKernel, packed_bytes: Callable[[memoryview], int]
) -> Choice:
    """Return the best of `widths`, which ascend, for an object's bytes, by `packed_bytes`, the packed length of a
    plane. A wider one must be better by more than chance."""
    sample = sample_of(data)
    least, best = _tried(sample, widths[0], kernel, packed_bytes)
    for width in widths[1:]:
        held, choice = _tried(sample, width, kernel, packed_bytes)
        if held < least - least // _WORTH:
            least, best = held, choice
    return best


def sample_of(data: memoryview) -> memoryview:
    """Return runs of bytes from all over the object, whole elements of any width; all of a small object."""
    wanted = min(max(_LEAST, data.nbytes // _PART), _MOST)
    if data.nbytes <= wanted:
        return data
    run = wanted // _RUNS // 8 * 8
    step = (data.nbytes - run) // (_RUNS - 1) // 8 * 8
    return memoryview(b"".join(data[at : at + run] for at in range(0, _RUNS * step, step)))


def _tried(
    sample: memoryview, width: int, kernel: PlaneKernel, packed_bytes: Callable[[memoryview], int]
) -> tuple[int, Choice]:
    count = sample.nbytes // width
    planes = [memoryview(bytearray(count)) for _ in range(width)]
    kernel.split(sample[: count * width], planes)
    sizes = [packed_bytes(plane) for plane in planes]
    shrinks = [size < count - count // _WORTH for size in sizes]
    held = sum(size if shrink else count for size, shrink in zip(sizes, shrinks, strict=True))
    return held, Choice(width, shrinks)


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
    """One form for all kernels. Without a dtype a sample tells the width of an element.

    Allocates the packed bytes in `encode`, and nothing that grows with the object in `decode_into`."""

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
                raise ValueError(f"the packed form has {packed.nbytes} bytes, expected {HEADER_BYTES + out.nbytes}")
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
            raise ValueError(f"a packed plane has {held.nbytes} bytes, expected at most {piece.elements}")
        try:
            size = zstandard.frame_content_size(held)
            if size != piece.elements:
                raise ValueError(f"a plane has {size} bytes, expected {piece.elements}")
            return self._contexts.decompressor.decompress(held, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(f"the Zstandard frame is damaged: {error}") from error
