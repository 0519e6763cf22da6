"""Tests of the round trip, any content, size, thread and process, and of the caller's memory."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import threading
import tracemalloc

import pytest

from kvf_dev.testing.codec.kit import CONTENTS, CodecKit, MakeCodec
from kvf_dev.testing.kit import interleaved
from kvframework.api.codec import MAX_CODEC_NAME, Codec
from kvframework.api.plugin import DTYPE_BYTES
from kvframework.errors import ConfigFieldError

_TIMES = 200
_ELSEWHERE = """
import sys
data = bytes(number * number % 251 for number in range(50_000))
sys.stdout.buffer.write(b"".join(made.encode(memoryview(data))))
"""


class PackingTests(CodecKit):
    """Packing followed by unpacking."""

    def test_its_name_fits_into_an_envelope(self, codec: Codec) -> None:
        self.must_be_named(codec.name)
        assert codec.name.isascii(), f"{codec.name!r} is not ASCII"
        assert len(codec.name) <= MAX_CODEC_NAME, f"{codec.name!r} is longer than {MAX_CODEC_NAME} (MAX_CODEC_NAME)"

    @pytest.mark.parametrize("content", CONTENTS)
    def test_what_is_packed_is_unpacked(self, codec: Codec, content: str) -> None:
        """Also what is packed already, and looks like it."""
        data = CONTENTS[content]
        packed = self.pack(codec, data)
        self.must_unpack(codec, packed, data, content)
        for again in (packed, packed + packed, packed[: len(packed) // 2], packed[:4] + CONTENTS["text"]):
            self.must_unpack(codec, self.pack(codec, again), again, "which are packed bytes themselves")

    def test_any_size_comes_back(self, codec: Codec) -> None:
        """Blocks and words of a format end somewhere, and so do those of a page, a sector and a cache line."""
        for nbytes in (1 << 20, (1 << 20) + 8, (3 << 20) + 5):
            for data in (bytes(nbytes), random.Random(nbytes).randbytes(nbytes)):  # noqa: S311  fixed content
                self.must_unpack(codec, self.pack(codec, data), data)
        blocks = (512, 1024, 4096, 8192, 32_768, 65_536, 131_072)
        for nbytes in [*range(300), *(block + more for block in blocks for more in (-1, 0, 1, 3))]:
            for content in ("noise", "text", "zeros"):
                data = CONTENTS[content][:nbytes].ljust(nbytes, b"\1")
                self.must_unpack(codec, self.pack(codec, data), data)

    @pytest.mark.parametrize("dtype", ["", *DTYPE_BYTES, "a dtype of later releases"])
    def test_elements_of_any_dtype_come_back(self, codec: Codec, dtype: str) -> None:
        """The dtype is what an engine has declared: the bytes may be anything, and need not be whole elements."""
        for content, data in CONTENTS.items():
            for nbytes in {len(data), max(0, len(data) - 1), max(0, len(data) - 3)}:
                packed = self.pack(codec, data[:nbytes], dtype)
                self.must_unpack(codec, packed, data[:nbytes], f"{content}, told as elements of {dtype!r}")

    def test_a_batch_is_packed_before_it_is_sent(self, codec: Codec) -> None:
        """The return value of `encode` stays unchanged while the codec packs other objects."""
        objects = list(CONTENTS.values())
        batch = [self.parts_of(codec, memoryview(data)) for data in objects]
        packed = [b"".join(parts) for parts in batch]
        for data in reversed(objects):
            self.must_unpack(codec, self.pack(codec, data), data, "while others are packed")
        changed = sum(b"".join(parts) != before for parts, before in zip(batch, packed, strict=True))
        assert not changed, f"the packed bytes of {changed} objects were written over"
        for each, data in zip(packed, objects, strict=True):
            self.must_unpack(codec, each, data, "of a batch")

    def test_a_call_knows_nothing_of_others(self, make_codec: MakeCodec) -> None:
        """Another codec unpacks the bytes in any order: no state is kept outside the packed bytes."""
        writer = make_codec()
        packed = {data: self.pack(writer, data) for data in CONTENTS.values()}
        reader = make_codec()
        for data, each in reversed(packed.items()):
            self.must_unpack(reader, each, data, "by another codec, in another order")

    def test_other_options_read_the_same(self, codec: Codec) -> None:
        """Options may change the ratio, not the readability: another server has other ones."""
        if not self.options:
            pytest.skip("the codec has no `options`")
        try:
            other = self.by_name({})()
        except ConfigFieldError as error:
            pytest.skip(f"there is no codec without options: {error.fact}")
        for content, data in CONTENTS.items():
            self.must_unpack(other, self.pack(codec, data), data, f"{content}, by a codec without options")
            self.must_unpack(codec, self.pack(other, data), data, f"{content}, packed without options")

    def test_objects_that_differ_in_one_byte_are_different(self, codec: Codec) -> None:
        """What is remembered by length, ends, address or a part of the bytes is another object's."""
        held = bytearray(CONTENTS["noise"][:20_000])
        with memoryview(held) as view:
            for at in (0, 1, 63, 64, 4095, 4096, 9_999, 10_000, 19_935, 19_998, 19_999):
                held[at] ^= 0x55
                packed = b"".join(self.parts_of(codec, view))
                self.must_unpack(codec, packed, bytes(held), f"which differs from the one before in byte {at}")

    def test_it_keeps_nothing_of_its_calls(self, codec: Codec) -> None:
        def use(times: int) -> None:
            for index in range(times):
                data = CONTENTS["numbers"][index : 8000 + index]
                self.must_unpack(codec, self.pack(codec, data), data)

        def held() -> int:
            return threading.active_count() + len(os.listdir("/proc/self/fd"))

        tracemalloc.start()
        try:
            use(_TIMES)
            before, opened = tracemalloc.get_traced_memory()[0], held()
            use(_TIMES)
            grown, opened = tracemalloc.get_traced_memory()[0] - before, held() - opened
        finally:
            tracemalloc.stop()
        assert grown < _TIMES * 100, f"{grown} bytes are kept of {_TIMES} objects"
        assert opened < _TIMES // 4, f"{opened} descriptors and threads are kept of {_TIMES} objects"

    def test_what_another_process_packed_is_unpacked(self, codec: Codec) -> None:
        """The other process stands for the server before a restart, or another node."""
        data = bytes(number * number % 251 for number in range(50_000))
        packed = self.elsewhere(codec, _ELSEWHERE, seed=1)
        self.must_unpack(codec, packed, data, "packed by another process")

    def test_a_call_is_not_disturbed_at_any_step(self, codec: Codec) -> None:
        """Before each instruction of a call another thread packs and unpacks: no time is too short to be in the way."""
        data, others = CONTENTS["noise"][:1000], CONTENTS["text"][:777]
        packed_others = self.pack(codec, others)

        def other() -> None:
            codec.encode(memoryview(others))
            codec.decode_into(memoryview(packed_others), memoryview(bytearray(len(others))))

        packed = b"".join(interleaved(lambda: codec.encode(memoryview(data)), other))
        place = bytearray(len(data))
        interleaved(lambda: codec.decode_into(memoryview(packed), memoryview(place)), other)
        self.must_be(place, data, "an object beside which another one is packed and unpacked")


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

    @pytest.mark.parametrize("cut", [0, 1], ids=["whole", "damaged"])
    def test_memory_is_let_go_when_a_call_has_ended(self, codec: Codec, cut: int) -> None:
        """Packed parts may borrow the object until the tier has stored them."""
        for data in CONTENTS.values():
            memory = bytearray(data)
            parts = codec.encode(memoryview(memory))
            packed, place = bytearray(b"".join(parts)), bytearray(len(data))
            del parts
            _must_be_free(memory, "the object")
            del packed[max(len(packed) - cut, 0) :]
            with contextlib.suppress(*[ValueError] * cut):
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
