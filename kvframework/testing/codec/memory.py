"""Tests of the caller's memory: any kind is accepted, only the object's place changes, and no view is kept."""

from __future__ import annotations

import contextlib
import gc
import mmap

import pytest

from kvframework.api.codec import Codec
from kvframework.testing.codec.kit import CONTENTS, FILLING, CodecKit

_SHIFT = 3


class MemoryTests(CodecKit):
    """Objects lie in the arena, a mapping, at any offset; packed bytes lie in their own memory, which is only read."""

    @pytest.mark.parametrize("kind", ["bytes", "bytearray", "mapping"])
    def test_any_memory_is_packed_and_left_as_it_is(self, codec: Codec, kind: str) -> None:
        for data in CONTENTS.values():
            held = b"\x11" * _SHIFT + data + b"\x22"
            memory: bytes | bytearray | mmap.mmap = held if kind == "bytes" else bytearray(held)
            if kind == "mapping":
                memory = mmap.mmap(-1, len(held))
                memory[:] = held
            parts = codec.encode(memoryview(memory)[_SHIFT:-1])
            assert self.unpack(codec, b"".join(parts), len(data)) == data
            del parts
            assert memory[:] == held, "what is packed is still the caller's, and may be read by others meanwhile"

    def test_an_object_is_unpacked_in_a_mapping(self, codec: Codec) -> None:
        for data in CONTENTS.values():
            packed = self.pack(codec, data)
            with mmap.mmap(-1, len(data) + 2 * _SHIFT) as memory:
                memory[:] = bytes([FILLING]) * len(memory)
                with memoryview(memory) as whole, whole[_SHIFT : _SHIFT + len(data)] as place:
                    codec.decode_into(memoryview(packed), place)
                    assert place == data
                assert set(memory[:_SHIFT] + memory[_SHIFT + len(data) :]) == {FILLING}

    def test_packed_bytes_are_left_as_they_are(self, codec: Codec) -> None:
        for data in CONTENTS.values():
            packed = self.pack(codec, data)
            held = bytearray(b"\x11" * _SHIFT + packed + b"\x22")
            place = bytearray(len(data))
            with memoryview(held) as whole, whole[_SHIFT:-1] as view:
                codec.decode_into(view, memoryview(place))
                codec.decode_into(view.toreadonly(), memoryview(place))
            assert place == data
            assert held == b"\x11" * _SHIFT + packed + b"\x22"

    def test_what_was_in_the_place_does_not_matter(self, codec: Codec) -> None:
        for data in CONTENTS.values():
            packed = self.pack(codec, data)
            for before in (bytes(len(data)), b"\xff" * len(data), data[::-1]):
                place = bytearray(before)
                codec.decode_into(memoryview(packed), memoryview(place))
                assert place == data

    def test_an_object_is_let_go_with_its_packed_bytes(self, codec: Codec) -> None:
        """Packed parts may borrow the object until the tier has stored them."""
        for data in CONTENTS.values():
            memory = bytearray(data)
            parts = codec.encode(memoryview(memory))
            del parts
            gc.collect()
            memory.clear()  # raises BufferError if a view of it is left

    def test_memory_is_let_go_when_all_is_unpacked(self, codec: Codec) -> None:
        for data in CONTENTS.values():
            packed, place = bytearray(self.pack(codec, data)), bytearray(len(data))
            codec.decode_into(memoryview(packed), memoryview(place))
            gc.collect()
            packed.clear()
            place.clear()

    def test_memory_is_let_go_after_an_error(self, codec: Codec) -> None:
        data = CONTENTS["text"]
        packed, place = bytearray(self.pack(codec, data)[:-1]), bytearray(len(data))
        with contextlib.suppress(ValueError):
            codec.decode_into(memoryview(packed), memoryview(place))
        gc.collect()
        packed.clear()
        place.clear()
