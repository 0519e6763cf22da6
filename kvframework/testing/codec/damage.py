"""Tests of damaged packed bytes: `ValueError`, and no write outside the object's place."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvframework.api.codec import Codec
from kvframework.testing.codec.kit import CONTENTS, CodecKit

_SAMPLES = ["a byte", "text", "numbers"]
_MIB = 1 << 20


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
        ends = {*range(min(len(packed), 24)), *range(max(0, len(packed) - 24), len(packed)), len(packed) // 2}
        for end in sorted(ends):
            self.must_refuse(codec, packed[:end], len(data), f"{end} of {len(packed)} packed bytes")

    @pytest.mark.parametrize("content", ["nothing", *_SAMPLES])
    def test_what_is_more_than_was_packed_is_refused(self, codec: Codec, content: str) -> None:
        data = CONTENTS[content]
        packed = self.pack(codec, data)
        for more in filter(None, (b"\0", b"more", bytes(5000), packed)):
            self.must_refuse(codec, packed + more, len(data), f"{len(more)} bytes behind {len(packed)}")
            self.must_refuse(codec, more + packed, len(data), f"{len(more)} bytes before {len(packed)}")

    def test_what_was_never_packed_is_refused(self, codec: Codec) -> None:
        @settings(max_examples=2 * self.examples, deadline=None)
        @given(packed=st.binary(max_size=200), nbytes=st.integers(0, 300))
        def check(packed: bytes, nbytes: int) -> None:
            if not self.detects_damage:
                self._refused_or(codec, packed, nbytes)
            elif packed or nbytes:
                self.must_refuse(codec, packed, nbytes, f"made-up bytes {packed!r}")

        check()

    def test_what_was_changed_is_refused(self, codec: Codec) -> None:
        """Unpacking to the original bytes is accepted, since some bits of a format mean nothing."""

        @settings(max_examples=4 * self.examples, deadline=None)
        @given(content=st.sampled_from(_SAMPLES), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
        @example(content="text", place=0.5, flip=1)
        def check(content: str, place: float, flip: int) -> None:
            data = CONTENTS[content]
            packed = bytearray(self.pack(codec, data))
            packed[int(place * len(packed))] ^= flip
            found = self._refused_or(codec, bytes(packed), len(data))
            if found is not None and self.detects_damage:
                assert found == data, "changed bytes were unpacked to others"

        check()

    def test_where_two_objects_were_mixed_is_refused(self, codec: Codec) -> None:
        chance = random.Random(3)  # noqa: S311  fixed content
        one, other = (bytes(chance.choices(range(16), k=30_000)) for _ in range(2))
        ours, theirs = self.pack(codec, one), self.pack(codec, other)
        for cut in (len(ours) // 3, len(ours) // 2, len(ours) - 10):
            found = self._refused_or(codec, ours[:cut] + theirs[cut:], len(one))
            if found is not None and self.detects_damage:
                assert found == one, "a mixture was unpacked"

    def test_a_small_place_takes_little_memory(self, codec: Codec) -> None:
        """The bound holds whatever the packed bytes unpack to."""
        packed = self.pack(codec, bytes(32 * _MIB))
        tracemalloc.start()
        try:
            self.must_refuse(codec, packed, 1000, "32 MiB in the place of 1000 bytes")
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert most < 2 * len(packed) + 4 * _MIB, f"{most} bytes were allocated for a place of 1000"

    def test_it_works_after_an_error(self, codec: Codec) -> None:
        data = CONTENTS["text"]
        packed = self.pack(codec, data)
        for _ in range(3):
            self.must_refuse(codec, packed[: len(packed) // 2], len(data), "half of the packed bytes")
            assert self.unpack(codec, packed, len(data)) == data

    def _refused_or(self, codec: Codec, packed: bytes, nbytes: int) -> bytes | None:
        """Return the unpacked bytes, None if they were refused."""
        try:
            return self.unpack(codec, packed, nbytes)
        except ValueError:
            return None
