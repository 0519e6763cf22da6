"""Tests of damaged packed bytes: `ValueError`, and no write outside the object's place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest

from kvf_dev.testing.codec.kit import CONTENTS, CodecKit
from kvframework.api.codec import Codec

_SAMPLES = ["a byte", "text", "numbers", "noise"]
_MIB = 1 << 20
# Bytes at each end of the packed form that are changed one by one: headers and checksums lie there.
_END = 24
# Numbers that a forged header may claim.
_CLAIMS = [(1 << 62, 8), (1 << 40, 8), (1 << 31, 8), (0xFFFF_FFFF, 4), (0x7FFF_FFFF, 4), (1 << 30, 4), (1 << 28, 4)]


class DamageTests(CodecKit):
    """The place has the length of the object. Its content after an error does not matter; bytes beside it must not
    change.
    """

    @pytest.mark.parametrize("content", CONTENTS)
    def test_another_length_is_refused(self, codec: Codec, content: str) -> None:
        data = CONTENTS[content]
        packed = self.pack(codec, data)
        for nbytes in {0, 1, len(data) // 2, len(data) - 1, len(data) + 1, 2 * len(data) + 1, _MIB} - {len(data), -1}:
            self.must_refuse(codec, packed, nbytes, f"an object of {len(data)} bytes in the place of one of {nbytes}")

    @pytest.mark.parametrize("content", _SAMPLES)
    def test_what_is_cut_off_is_refused(self, codec: Codec, content: str) -> None:
        data = CONTENTS[content]
        packed = self.pack(codec, data)
        ends = {*range(min(len(packed), 64)), *range(max(0, len(packed) - 64), len(packed))}
        ends |= {len(packed) * part // 16 for part in range(16)}
        for end in sorted(ends):
            self.must_refuse(codec, packed[:end], len(data), f"{end} of {len(packed)} packed bytes")
            if end:
                self.must_refuse(codec, packed[-end:], len(data), f"the last {end} of {len(packed)} packed bytes")
        self.must_unpack(codec, packed, data, "after errors")

    @pytest.mark.parametrize("content", ["nothing", *_SAMPLES])
    def test_what_is_more_than_was_packed_is_refused(self, codec: Codec, content: str) -> None:
        data = CONTENTS[content]
        packed = self.pack(codec, data)
        for more in filter(None, (b"\0", b"\n", b"\xff", b"more", bytes(5000), packed, self.pack(codec, b"another"))):
            self.must_refuse(codec, packed + more, len(data), f"{len(more)} bytes behind {len(packed)}")
            self.must_refuse(codec, more + packed, len(data), f"{len(more)} bytes before {len(packed)}")

    @pytest.mark.parametrize("content", _SAMPLES)
    def test_one_bit_at_either_end_is_noticed(self, codec: Codec, content: str) -> None:
        """Headers and checksums lie at the ends."""
        data = CONTENTS[content]
        packed = self.pack(codec, data)
        for at in {*range(min(_END, len(packed))), *range(max(0, len(packed) - _END), len(packed))}:
            for bit in range(8):
                changed = bytearray(packed)
                changed[at] ^= 1 << bit
                self.must_notice(codec, bytes(changed), data, f"bit {bit} of byte {at} of {len(packed)} was flipped")

    @pytest.mark.parametrize("content", ["text", "numbers", "noise"])
    def test_every_kind_of_damage_is_noticed(self, codec: Codec, content: str) -> None:
        """As disks, networks and broken stores do it: a checksum that adds up notices only some of it."""
        data = CONTENTS[content]
        packed = self.pack(codec, data)
        for what, damaged in _damages(packed):
            if damaged != packed:
                self.must_notice(codec, damaged, data, what)

    def test_a_small_place_takes_little_memory(self, codec: Codec) -> None:
        """The bound holds whatever the packed bytes unpack to."""
        packed = self.pack(codec, bytes(32 * _MIB))
        most = self.most_memory(lambda: self.must_refuse(codec, packed, 1000, "32 MiB in the place of 1000 bytes"))
        assert most < 2 * len(packed) + 4 * _MIB, f"{most} bytes were allocated for a place of 1000"

    def test_a_claim_takes_no_memory(self, codec: Codec) -> None:
        """The packed bytes are forged: somewhere at their beginning or end they claim a large number."""
        data = CONTENTS["text"]
        packed = self.pack(codec, data)
        for claim, width in _CLAIMS:
            for order in ("little", "big"):
                number = claim.to_bytes(width, order)
                for at in {*range(min(24, len(packed) - width)), max(0, len(packed) - width)}:
                    forged = packed[:at] + number + packed[at + width :]
                    most = self.most_memory(partial(self.refused_or, codec, forged, len(data)))
                    bound = 8 * (len(packed) + len(data)) + 4 * _MIB
                    assert most < bound, f"{most} bytes were allocated for {len(data)}: bytes {at} on claim {claim}"


def _damages(packed: bytes) -> Iterator[tuple[str, bytes]]:
    """Return what happened to the packed bytes, and what they are then."""
    chance, size = random.Random(9), len(packed)  # noqa: S311  fixed places
    for _ in range(40):
        at, to = sorted(chance.sample(range(size), 2)) if size > 1 else (0, 0)
        yield f"byte {at} was lost", packed[:at] + packed[at + 1 :]
        yield f"byte {at} came twice", packed[: at + 1] + packed[at:]
        swapped = bytearray(packed)
        swapped[at], swapped[to] = swapped[to], swapped[at]
        yield f"bytes {at} and {to} were exchanged", bytes(swapped)
        both, bit = bytearray(packed), 1 << chance.randrange(8)
        both[at] ^= bit
        both[to] ^= bit
        yield f"the same bit was flipped in bytes {at} and {to}", bytes(both)
        moved = bytearray(packed)
        moved[at], moved[to] = (moved[at] + 1) & 0xFF, (moved[to] - 1) & 0xFF
        yield f"byte {at} is one more and byte {to} one less", bytes(moved)
    for page in (16, 512, 4096):
        if size >= 2 * page:
            at = chance.randrange(size // page - 1) * page
            head, one = packed[:at], packed[at : at + page]
            other, tail = packed[at + page : at + 2 * page], packed[at + 2 * page :]
            yield f"two pages of {page} bytes were exchanged", head + other + one + tail
            yield f"a page of {page} bytes was written twice", head + one + one + tail
            for filler in (b"\0", b"\xff"):
                yield f"a page of {page} bytes was overwritten", head + filler * page + other + tail
    yield "all bytes are zero", bytes(size)
    yield "the bytes are in the opposite order", packed[::-1]
    yield "only zeros are left of the second half", packed[: size // 2].ljust(size, b"\0")
