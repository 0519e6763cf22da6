"""The settings and fixtures that the author of a codec gives to the kit, and the methods its tests share."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from kvf_dev.testing.kit import must_be_equal
from kvf_dev.testing.making import NamedKit
from kvframework.api.codec import Codec, CodecProvider
from kvframework.api.plugin import Buffer

MakeCodec = Callable[[], Codec]

# Length of the guard before and behind an object's place, and the byte that fills the guards and the unfilled place.
GUARD = 64
FILLING = 0xEE

_chance = random.Random(20)  # noqa: S311  fixed content
CONTENTS = {
    "nothing": b"",
    "a byte": b"x",
    "zeros": bytes(70_000),
    "noise": _chance.randbytes(65_537),
    "text": b"keys and values " * 4096,
    "every pair": struct.pack("<65536H", *range(1 << 16)),
    "runs": b"".join(bytes([number % 251]) * (number % 700) for number in range(900)),
    "half noise": _chance.randbytes(40_000) + bytes(40_001),
    "numbers": b"".join(struct.pack("<f", _chance.gauss(0, 1))[2:] for _ in range(20_000)),
}
"""Contents by name; the numbers are bfloat16, as in KV."""


class CodecKit(NamedKit):
    """Settings and fixtures of the kit. An author must give either `use` or a `make_codec` fixture."""

    _descriptor = CodecProvider

    detects_damage: ClassVar[bool] = True
    """Whether changed packed bytes are refused, and not only those of another length. Where False, the checksum that
    the server puts over them is the only protection.
    """

    @pytest.fixture
    def make_codec(self) -> MakeCodec:
        """Return a factory of codecs; a server makes a codec when a value first needs it."""
        return self.by_name()

    @pytest.fixture
    def codec(self, make_codec: MakeCodec) -> Codec:
        return make_codec()

    def pack(self, codec: Codec, data: bytes, dtype: str | None = None) -> bytes:
        """Return the bytes that a tier receives for `data`, elements of `dtype` if one is given."""
        return b"".join(self.parts_of(codec, memoryview(data), dtype))

    def parts_of(self, codec: Codec, data: memoryview, dtype: str | None = None) -> Sequence[memoryview]:
        """Return what `encode` answers, or `encode_elements` with a `dtype`; fails unless that is a sequence of views
        of bytes."""
        try:
            parts = codec.encode(data) if dtype is None else codec.encode_elements(data, dtype)
        except Exception as error:  # noqa: BLE001  reported as the test's failure
            told = "" if dtype is None else f", told as elements of {dtype!r}"
            pytest.fail(f"encode raised {type(error).__name__} ({error}) for an object of {data.nbytes} bytes{told}")
        must = "the packed form is a sequence of 1-D views of bytes, gone through several times"
        assert isinstance(parts, Sequence), f"encode answered a {type(parts).__name__}: {must}"
        for part in parts:
            assert isinstance(part, memoryview), f"encode answered a part that is a {type(part).__name__}: {must}"
            form = (part.ndim, part.itemsize, part.c_contiguous)
            assert form == (1, 1, True), f"a part has (ndim, itemsize, contiguous) {form}: {must}"
        return parts

    def unpack(self, codec: Codec, packed: bytes, nbytes: int, *, shift: int = 0) -> bytes:
        """Unpack into a place of `nbytes` and return its content. Fails if a byte beside the place was written, whether
        or not the codec raises. `shift` moves the place in memory.
        """
        arena = bytearray([FILLING]) * (nbytes + 2 * GUARD + shift)
        begin = GUARD + shift
        with memoryview(arena) as whole, whole[begin : begin + nbytes] as place:
            try:
                codec.decode_into(memoryview(packed), place)
            finally:
                beside = arena[:begin] + arena[begin + nbytes :]
                assert set(beside) == {FILLING}, "bytes beside the object's place were written"
            return bytes(place)

    def must_unpack(self, codec: Codec, packed: bytes, data: bytes, why: str = "", *, shift: int = 0) -> None:
        """Fail unless `packed` unpacks to `data`."""
        told = f"an object of {len(data)} bytes{', ' * bool(why)}{why}"
        try:
            found = self.unpack(codec, packed, len(data), shift=shift)
        except Exception as error:  # noqa: BLE001  reported as the test's failure
            pytest.fail(f"decode_into raised {type(error).__name__} ({error}) for what encode made: {told}")
        self.must_be(found, data, told)

    def must_be(self, found: Buffer, data: bytes, what: str) -> None:
        must_be_equal(found, data, f"another object's bytes, of {what}")

    def refused_or(self, codec: Codec, packed: bytes, nbytes: int) -> bytes | None:
        """Return the unpacked bytes, None if they were refused. No other error is accepted: the server deletes damaged
        values, and treats any other error as a bug of the codec, whose values may be good.
        """
        try:
            return self.unpack(codec, packed, nbytes)
        except ValueError:
            return None
        except Exception as error:  # noqa: BLE001  reported as the test's failure
            kind = f"{type(error).__module__}.{type(error).__qualname__}"
            pytest.fail(f"damaged bytes raised {kind} ({error}) instead of ValueError")

    def must_refuse(self, codec: Codec, packed: bytes, nbytes: int, why: str) -> None:
        """Fail unless unpacking raises `ValueError`."""
        if self.refused_or(codec, packed, nbytes) is not None:
            pytest.fail(f"unpacked instead of raising ValueError: {why}")

    def must_notice(self, codec: Codec, packed: bytes, data: bytes, why: str) -> None:
        """Fail if damaged bytes are unpacked to another object than `data`."""
        found = self.refused_or(codec, packed, len(data))
        if found not in (None, data) and self.detects_damage:
            pytest.fail(f"changed bytes were unpacked to others: {why}")

    def most_memory(self, work: Callable[[], object]) -> int:
        """Return the bytes that `work` has allocated at most."""
        tracemalloc.start()
        try:
            work()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
