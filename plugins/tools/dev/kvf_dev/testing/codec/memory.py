"""Tests of the caller's memory: any kind is accepted, only the object's place changes, and no view is kept."""

from __future__ import annotations

import contextlib
import gc
import mmap

import pytest

from kvf_dev.testing.codec.kit import CONTENTS, FILLING, CodecKit
from kvframework.api.codec import Codec

_SHIFT = 3
# In a process of its own: a write to memory that may only be read, behind a view that could be written, ends it.
_UNWRITABLE = """
import ctypes, faulthandler, mmap
faulthandler.enable()

def only_read(data):
    memory = mmap.mmap(-1, max(len(data), 1))
    memory[: len(data)] = data
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(place), ctypes.c_size_t(len(memory)), 1) == 0
    return memoryview(memory)[: len(data)]

for data in (b"keys and values " * 4096, bytes(number * number % 251 for number in range(5001)), b"x", b""):
    packed = b"".join(made.encode(only_read(data)))
    place = bytearray(len(data))
    made.decode_into(only_read(packed), memoryview(place))
    assert place == data, "another object's bytes"
"""


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
            parts = self.parts_of(codec, memoryview(memory)[_SHIFT:-1])
            self.must_unpack(codec, b"".join(parts), data, f"packed from a {kind}")
            del parts
            assert memory[:] == held, (
                "the object was changed: what is packed is still the caller's, and may be read by others meanwhile"
            )

    def test_neither_an_object_nor_packed_bytes_are_written_even_for_an_instant(self, codec: Codec) -> None:
        """Others read both meanwhile, so bytes that are put back are wrong, too: here, a write ends the process."""
        self.elsewhere(codec, _UNWRITABLE, seed=1)

    @pytest.mark.parametrize("content", ["text", "numbers", "noise", "every pair"])
    def test_memory_may_begin_at_any_address(self, codec: Codec, content: str) -> None:
        """Objects and packed bytes may begin and end at any byte, and the packed form does not follow from where."""
        data = CONTENTS[content][:9001]
        held = bytearray(len(data) + 64)
        for shift in range(33):
            held[shift : shift + len(data)] = data
            with memoryview(held) as whole, whole[shift : shift + len(data)] as view:
                packed = b"".join(self.parts_of(codec, view))
            self.must_unpack(
                codec, packed, data, f"packed from and unpacked to an address moved by {shift}", shift=shift
            )
            moved = bytes(shift) + packed + b"\x99"
            place = bytearray(len(data))
            codec.decode_into(memoryview(moved)[shift:-1], memoryview(place))
            self.must_be(place, data, f"unpacked from an address moved by {shift}")

    def test_an_object_is_unpacked_in_a_mapping(self, codec: Codec) -> None:
        for data in CONTENTS.values():
            packed = self.pack(codec, data)
            with mmap.mmap(-1, len(data) + 2 * _SHIFT) as memory:
                memory[:] = bytes([FILLING]) * len(memory)
                with memoryview(memory) as whole, whole[_SHIFT : _SHIFT + len(data)] as place:
                    codec.decode_into(memoryview(packed), place)
                    self.must_be(place, data, "unpacked in a mapping")
                beside = set(memory[:_SHIFT] + memory[_SHIFT + len(data) :])
                assert beside == {FILLING}, "bytes beside the object's place were written"

    def test_packed_bytes_are_left_as_they_are(self, codec: Codec) -> None:
        for data in CONTENTS.values():
            packed = self.pack(codec, data)
            held = bytearray(b"\x11" * _SHIFT + packed + b"\x22")
            place = bytearray(len(data))
            with memoryview(held) as whole, whole[_SHIFT:-1] as view:
                codec.decode_into(view, memoryview(place))
                codec.decode_into(view.toreadonly(), memoryview(place))
            self.must_be(place, data, "unpacked from read-only memory")
            assert held == b"\x11" * _SHIFT + packed + b"\x22", "the packed bytes were changed"

    def test_what_was_in_the_place_does_not_matter(self, codec: Codec) -> None:
        for data in CONTENTS.values():
            packed = self.pack(codec, data)
            for before in (bytes(len(data)), b"\xff" * len(data), data[::-1]):
                place = bytearray(before)
                codec.decode_into(memoryview(packed), memoryview(place))
                self.must_be(place, data, "unpacked over other content: what was in the place counts")

    def test_an_object_is_let_go_with_its_packed_bytes(self, codec: Codec) -> None:
        """Packed parts may borrow the object until the tier has stored them."""
        for data in CONTENTS.values():
            memory = bytearray(data)
            parts = codec.encode(memoryview(memory))
            del parts
            _must_be_free(memory, "the object")

    def test_memory_is_let_go_when_all_is_unpacked(self, codec: Codec) -> None:
        for data in CONTENTS.values():
            packed, place = bytearray(self.pack(codec, data)), bytearray(len(data))
            codec.decode_into(memoryview(packed), memoryview(place))
            _must_be_free(packed, "the packed bytes")
            _must_be_free(place, "the object's place")

    def test_memory_is_let_go_after_an_error(self, codec: Codec) -> None:
        data = CONTENTS["text"]
        packed, place = bytearray(self.pack(codec, data)[:-1]), bytearray(len(data))
        with contextlib.suppress(ValueError):
            codec.decode_into(memoryview(packed), memoryview(place))
        _must_be_free(packed, "the packed bytes")
        _must_be_free(place, "the object's place")


def _must_be_free(memory: bytearray, what: str) -> None:
    """Fail if a view of `memory` is left."""
    gc.collect()
    try:
        memory.clear()
    except BufferError:
        pytest.fail(f"the codec keeps a view of {what} (BufferError): L1 could not be closed")
