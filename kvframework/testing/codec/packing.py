"""Tests of the round trip: any content, any size, any thread and any process."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframework.api.codec import MAX_CODEC_NAME, Codec
from kvframework.testing.codec.kit import CONTENTS, CodecKit, MakeCodec

_OBJECTS = st.binary(max_size=5000) | st.builds(
    lambda piece, times: piece * times, st.binary(max_size=40), st.integers(0, 900)
)
_ELSEWHERE = """
import sys
data = bytes(number * number % 251 for number in range(50_000))
sys.stdout.buffer.write(b"".join(made.encode(memoryview(data))))
"""


class PackingTests(CodecKit):
    """Packing followed by unpacking."""

    def test_its_name_fits_into_an_envelope(self, codec: Codec) -> None:
        self.must_be_named(codec.name)
        assert codec.name.isascii()
        assert len(codec.name) <= MAX_CODEC_NAME

    @pytest.mark.parametrize("content", CONTENTS)
    def test_what_is_packed_is_unpacked(self, codec: Codec, content: str) -> None:
        data = CONTENTS[content]
        assert self.unpack(codec, self.pack(codec, data), len(data)) == data

    @pytest.mark.parametrize("nbytes", [2, 255, 4096, 65_535, 65_536, 131_073, 1 << 20, (3 << 20) + 5])
    def test_any_size_comes_back(self, codec: Codec, nbytes: int) -> None:
        for data in (bytes(nbytes), random.Random(nbytes).randbytes(nbytes)):  # noqa: S311  fixed content
            assert self.unpack(codec, self.pack(codec, data), nbytes) == data

    def test_any_object_comes_back(self, codec: Codec) -> None:
        @settings(max_examples=self.examples, deadline=None)
        @given(data=_OBJECTS)
        def check(data: bytes) -> None:
            assert self.unpack(codec, self.pack(codec, data), len(data)) == data

        check()

    def test_the_packed_form_is_a_sequence_of_bytes(self, codec: Codec) -> None:
        """The server counts, sums and sends the parts in order; an empty object may have none."""
        for data in CONTENTS.values():
            packed = codec.encode(memoryview(data))
            assert isinstance(packed, Sequence), "parts are gone through several times"
            for part in packed:
                assert isinstance(part, memoryview)
                assert (part.ndim, part.itemsize, part.c_contiguous) == (1, 1, True)

    def test_a_batch_is_packed_before_it_is_sent(self, codec: Codec) -> None:
        """The return value of `encode` stays unchanged while the codec packs other objects."""
        objects = list(CONTENTS.values())
        batch = [codec.encode(memoryview(data)) for data in objects]
        packed = [b"".join(parts) for parts in batch]
        for data in reversed(objects):
            self.unpack(codec, self.pack(codec, data), len(data))
        assert [b"".join(parts) for parts in batch] == packed, "packed bytes were written over"
        assert [self.unpack(codec, each, len(data)) for each, data in zip(packed, objects, strict=True)] == objects

    def test_a_call_knows_nothing_of_others(self, make_codec: MakeCodec) -> None:
        """Another codec unpacks the bytes in any order: no state is kept outside the packed bytes."""
        writer = make_codec()
        packed = {data: self.pack(writer, data) for data in CONTENTS.values()}
        reader = make_codec()
        for data, each in reversed(packed.items()):
            assert self.unpack(reader, each, len(data)) == data

    def test_what_another_process_packed_is_unpacked(self, codec: Codec) -> None:
        """The other process stands for the server before a restart, or another node."""
        data = bytes(number * number % 251 for number in range(50_000))
        packed = self.elsewhere(codec, _ELSEWHERE, seed=1)
        assert self.unpack(codec, packed, len(data)) == data

    def test_threads_do_not_disturb_each_other(self, codec: Codec) -> None:
        """Storage threads share one codec."""

        def work(seed: int) -> None:
            data = random.Random(seed).randbytes(500) * 100  # noqa: S311  fixed content
            for _ in range(25):
                assert self.unpack(codec, self.pack(codec, data), len(data)) == data, "another object's bytes"

        self.in_threads(*(lambda seed=seed: work(seed) for seed in range(4)))
