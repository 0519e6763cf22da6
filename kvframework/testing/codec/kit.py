"""The settings and fixtures that the author of a codec gives to the kit, and the methods its tests share."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import ClassVar

import pytest

from kvframework.api.codec import Codec, CodecProvider
from kvframework.testing.making import NamedKit

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
    "numbers": b"".join(struct.pack("<f", _chance.gauss(0, 1))[2:] for _ in range(20_000)),
}
"""Contents by name; the numbers are bfloat16, as in KV."""


class CodecKit(NamedKit):
    """Settings and fixtures of the kit. An author must give either `use` or a `make_codec` fixture."""

    _descriptor = CodecProvider

    examples: ClassVar[int] = 60
    """How many generated objects, and kinds of damage, are tried."""

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

    def pack(self, codec: Codec, data: bytes) -> bytes:
        """Return the bytes that a tier receives for `data`."""
        return b"".join(codec.encode(memoryview(data)))

    def unpack(self, codec: Codec, packed: bytes, nbytes: int) -> bytes:
        """Unpack into a place of `nbytes` and return its content. Fails if a byte beside the place was written, whether
        or not the codec raises.
        """
        arena = bytearray([FILLING]) * (nbytes + 2 * GUARD)
        with memoryview(arena) as whole, whole[GUARD : GUARD + nbytes] as place:
            try:
                codec.decode_into(memoryview(packed), place)
            finally:
                beside = arena[:GUARD] + arena[GUARD + nbytes :]
                assert set(beside) == {FILLING}, "bytes beside the object's place were written"
            return bytes(place)

    def must_refuse(self, codec: Codec, packed: bytes, nbytes: int, why: str) -> None:
        """Fail unless unpacking raises `ValueError`. No other error is accepted: the server deletes damaged values, and
        treats any other error as a bug of the codec, whose values may be good.
        """
        try:
            self.unpack(codec, packed, nbytes)
        except ValueError:
            return
        pytest.fail(f"unpacked instead of raising ValueError: {why}")
