"""Owns what the author of a codec gives to the kit, and the words that its tests are written in."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import ClassVar

import pytest

from kvframework.api import Codec, CodecProvider
from kvframework.testing.making import NamedKit

MakeCodec = Callable[[], Codec]

# What lies before and behind the place of an object in these tests, and in it before it is filled.
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
"""By name; the numbers are bfloat16, as in KV."""


class CodecKit(NamedKit):
    """What an author may give. Required is either `use` or a `make_codec` fixture."""

    descriptor = CodecProvider

    examples: ClassVar[int] = 60
    """How many made-up objects, and kinds of damage, are tried."""

    detects_damage: ClassVar[bool] = True
    """Whether packed bytes that were changed are refused, and not only those of another length. Where False, the
    checksum that the server puts over them is all there is."""

    @pytest.fixture
    def make_codec(self) -> MakeCodec:
        """Makes the codec, as a server does when a value first needs it."""
        return self.by_name()

    @pytest.fixture
    def codec(self, make_codec: MakeCodec) -> Codec:
        return make_codec()

    def pack(self, codec: Codec, data: bytes) -> bytes:
        """What a tier gets to see of `data`."""
        return b"".join(codec.encode(memoryview(data)))

    def unpack(self, codec: Codec, packed: bytes, nbytes: int) -> bytes:
        """What the place of an object of `nbytes` holds then. Fails if a byte beside it was written, whether or not the
        codec raises."""
        arena = bytearray([FILLING]) * (nbytes + 2 * GUARD)
        with memoryview(arena) as whole, whole[GUARD : GUARD + nbytes] as place:
            try:
                codec.decode_into(memoryview(packed), place)
            finally:
                beside = arena[:GUARD] + arena[GUARD + nbytes :]
                assert set(beside) == {FILLING}, "bytes beside the object's place were written"
            return bytes(place)

    def must_refuse(self, codec: Codec, packed: bytes, nbytes: int, why: str) -> None:
        """Fails unless unpacking raises `ValueError`. Nothing else will do: the server deletes what is damaged, and
        takes any other error for a bug of the codec, whose values may be good."""
        try:
            self.unpack(codec, packed, nbytes)
        except ValueError:
            return
        pytest.fail(f"unpacked instead of raising ValueError: {why}")
