"""The kit over codecs that are wrong in one way each. Run by pytest outside of the repository; every class but the
first must fail."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Sequence
from itertools import cycle

import pytest

from kvf_dev.testing import CodecConformance
from kvf_dev.testing.codec.kit import MakeCodec
from kvframework.api.codec import Codec


class Right(Codec):
    name = "right"

    def encode(self, data: memoryview) -> Sequence[memoryview]:
        return [memoryview(self.packed(data))]

    def packed(self, data: memoryview) -> bytes:
        return zlib.compress(data, 1)

    def decode_into(self, packed: memoryview, out: memoryview) -> None:
        out[:] = self.unpacked(packed, out.nbytes)

    def unpacked(self, packed: memoryview, nbytes: int) -> bytes:
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(packed, nbytes + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if not self.is_whole(data, nbytes, stream):
            raise ValueError(f"no whole stream of {nbytes} bytes")
        return data

    def is_whole(self, data: bytes, nbytes: int, stream: zlib._Decompress) -> bool:
        return len(data) == nbytes and stream.eof and not stream.unused_data


class TestRightCodec(CodecConformance):
    @pytest.fixture
    def make_codec(self) -> MakeCodec:
        return Right


class TestNoCodec(CodecConformance):
    pass


class Planted(CodecConformance):
    Bug: type[Codec]

    @pytest.fixture
    def make_codec(self) -> MakeCodec:
        return self.Bug


class TestANameThatFitsNowhere(Planted):
    class Bug(Right):
        name = "a-name-of-17-byte"


class TestStripsZeros(Planted):
    class Bug(Right):
        def packed(self, data: memoryview) -> bytes:
            return super().packed(memoryview(bytes(data).rstrip(b"\0")))

        def unpacked(self, packed: memoryview, nbytes: int) -> bytes:
            return zlib.decompress(packed).ljust(nbytes, b"\0")


class TestLosesWhatIsBehind64K(Planted):
    class Bug(Right):
        def packed(self, data: memoryview) -> bytes:
            return super().packed(memoryview(bytes(data[: 1 << 16]) + bytes(max(0, data.nbytes - (1 << 16)))))


class TestAnswersAGenerator(Planted):
    class Bug(Right):
        def encode(self, data: memoryview) -> Sequence[memoryview]:
            return (memoryview(each) for each in [self.packed(data)])  # type: ignore[return-value]


class TestAnswersWords(Planted):
    class Bug(Right):
        def encode(self, data: memoryview) -> Sequence[memoryview]:
            packed = self.packed(data)
            whole = len(packed) // 4 * 4
            return [memoryview(packed)[:whole].cast("I"), memoryview(packed)[whole:]]


class TestPacksAllIntoOneBuffer(Planted):
    class Bug(Right):
        def __init__(self) -> None:
            self.buffer = bytearray(8 << 20)

        def encode(self, data: memoryview) -> Sequence[memoryview]:
            packed = self.packed(data)
            self.buffer[: len(packed)] = packed
            return [memoryview(self.buffer)[: len(packed)]]


class TestKeepsADictionary(Planted):
    """Of what it packed itself: of no use to another process."""

    class Bug(Right):
        def __init__(self) -> None:
            self.known: list[bytes] = []

        def packed(self, data: memoryview) -> bytes:
            self.known.append(bytes(data))
            return super().packed(memoryview(len(self.known).to_bytes(4, "little")))

        def unpacked(self, packed: memoryview, nbytes: int) -> bytes:
            index = int.from_bytes(super().unpacked(packed, 4), "little") - 1
            if not index < len(self.known) or len(self.known[index]) != nbytes:
                raise ValueError("not known")
            return self.known[index]


class TestPacksByPythonsHash(Planted):
    class Bug(Right):
        def masked(self, data: Iterable[int]) -> bytes:
            mask = hash("right").to_bytes(8, "little", signed=True)
            return bytes(byte ^ part for byte, part in zip(data, cycle(mask)))

        def packed(self, data: memoryview) -> bytes:
            return self.masked(super().packed(data))

        def unpacked(self, packed: memoryview, nbytes: int) -> bytes:
            return super().unpacked(memoryview(self.masked(packed)), nbytes)


class TestSharesAScratchBuffer(Planted):
    class Bug(Right):
        def decode_into(self, packed: memoryview, out: memoryview) -> None:
            self.scratch = self.unpacked(packed, out.nbytes)
            time.sleep(0.001)
            out[:] = self.scratch[: out.nbytes].ljust(out.nbytes, b"\0")


class TestFillsWhatItCan(Planted):
    class Bug(Right):
        def unpacked(self, packed: memoryview, nbytes: int) -> bytes:
            try:
                data = zlib.decompressobj().decompress(packed, nbytes + 1)
            except zlib.error as error:
                raise ValueError(str(error)) from error
            return data[:nbytes].ljust(nbytes, b"\0")


class TestTakesWhatIsCutOff(Planted):
    class Bug(Right):
        def is_whole(self, data: bytes, nbytes: int, stream: zlib._Decompress) -> bool:
            return len(data) == nbytes


class TestTakesWhatComesBehind(Planted):
    class Bug(Right):
        def is_whole(self, data: bytes, nbytes: int, stream: zlib._Decompress) -> bool:
            return len(data) == nbytes and stream.eof


class TestRaisesItsOwnError(Planted):
    class Bug(Right):
        def unpacked(self, packed: memoryview, nbytes: int) -> bytes:
            stream = zlib.decompressobj()
            data = stream.decompress(packed, nbytes + 1)
            if not self.is_whole(data, nbytes, stream):
                raise ValueError("another length")
            return data


class TestBelievesTheBytes(Planted):
    """A raw stream has no checksum."""

    class Bug(Right):
        def packed(self, data: memoryview) -> bytes:
            return bytes(data)

        def unpacked(self, packed: memoryview, nbytes: int) -> bytes:
            if packed.nbytes != nbytes:
                raise ValueError("another length")
            return bytes(packed)


class TestUnpacksBombs(Planted):
    class Bug(Right):
        def unpacked(self, packed: memoryview, nbytes: int) -> bytes:
            try:
                data = zlib.decompress(packed)
            except zlib.error as error:
                raise ValueError(str(error)) from error
            if len(data) != nbytes:
                raise ValueError("another length")
            return data


class TestWritesBesideThePlace(Planted):
    """As native code would: it writes to where the memory goes on."""

    class Bug(Right):
        def decode_into(self, packed: memoryview, out: memoryview) -> None:
            data = self.unpacked(packed, out.nbytes)
            out[:] = data
            arena = memoryview(out.obj).cast("B")
            if arena.nbytes > out.nbytes + 64:
                arena[out.nbytes + 64] = 0


class TestAddsToWhatIsInThePlace(Planted):
    class Bug(Right):
        def decode_into(self, packed: memoryview, out: memoryview) -> None:
            data = self.unpacked(packed, out.nbytes)
            for index, byte in enumerate(data):
                if byte:
                    out[index] = byte


class TestShufflesInPlace(Planted):
    class Bug(Right):
        def encode(self, data: memoryview) -> Sequence[memoryview]:
            if data.readonly:
                return super().encode(data)
            data[:] = bytes(data)[::-1]
            return [memoryview(self.packed(memoryview(bytes(data)[::-1])))]


class TestNeedsWritableMemory(Planted):
    class Bug(Right):
        def packed(self, data: memoryview) -> bytes:
            import ctypes

            if data.nbytes:
                (ctypes.c_char * data.nbytes).from_buffer(data)
            return super().packed(data)


class TestKeepsTheObject(Planted):
    class Bug(Right):
        def encode(self, data: memoryview) -> Sequence[memoryview]:
            self.last = data[:]
            return super().encode(data)


class TestKeepsThePlace(Planted):
    class Bug(Right):
        def decode_into(self, packed: memoryview, out: memoryview) -> None:
            super().decode_into(packed, out)
            self.last = out[:]


class TestKeepsWhatFailed(Planted):
    class Bug(Right):
        def decode_into(self, packed: memoryview, out: memoryview) -> None:
            self.current = packed[:]
            super().decode_into(packed, out)
            del self.current
