"""The conformance kit for codecs: tests that every `Codec` must pass, see docs/plugins/codecs.md.

The kit does not judge the ratio: the server stores an object unpacked if packing does not make it smaller. Needs
pytest alone.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import pytest

from kvf_dev.testing.kit import NamedKit, held, interleaved, must_be_equal
from kvframework.api.codec import MAX_CODEC_NAME, MAX_OVERHEAD, Codec, CodecProvider, ValueName
from kvframework.api.plugin import DTYPE_BYTES
from kvframework.errors import ConfigFieldError

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


_TIMES = 200
_ELSEWHERE = """
import sys
data = bytes(number * number % 251 for number in range(50_000))
sys.stdout.buffer.write(b"".join(made.encode(memoryview(data))))
"""


_SHIFT = 3
_SAMPLES = ["a byte", "text", "numbers", "noise"]
_MIB = 1 << 20
# Bytes at each end of the packed form that are changed one by one: headers and checksums lie there.
_END = 24
# Numbers that a forged header may claim.
_CLAIMS = [(1 << 62, 8), (1 << 40, 8), (1 << 31, 8), (0xFFFF_FFFF, 4), (0x7FFF_FFFF, 4), (1 << 30, 4), (1 << 28, 4)]


def _must_be_free(memory: bytearray, what: str) -> None:
    gc.collect()
    try:
        memory.clear()
    except BufferError:
        pytest.fail(f"The codec keeps a view of {what} (BufferError): release it, or L1 cannot close")


def _damages(packed: bytes) -> Iterator[tuple[str, bytes]]:
    chance, size = random.Random(9), len(packed)  # noqa: S311  fixed places
    for at in {*range(min(_END, size)), *range(max(0, size - _END), size)}:
        for bit in range(8):
            yield (
                f"bit {bit} of byte {at} of {size} was flipped",
                packed[:at] + bytes([packed[at] ^ 1 << bit]) + packed[at + 1 :],
            )
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


class CodecConformance(NamedKit):
    """Base class of an author's test class, which gives `use`, or a fixture `make_codec`: a factory of new codecs."""

    _descriptor = CodecProvider
    usual_s = 12.0

    detects_damage: ClassVar[bool] = True
    """Whether changed packed bytes are refused, and not only those of another length. Where False, the checksum that
    the server puts over them is the only protection.
    """

    @pytest.fixture
    def make_codec(self) -> MakeCodec:
        return self.by_name()

    @pytest.fixture
    def codec(self, make_codec: MakeCodec) -> Codec:
        return make_codec()

    def pack(self, codec: Codec, data: bytes, dtype: str | None = None) -> bytes:
        return b"".join(self.parts_of(codec, memoryview(data), dtype))

    def parts_of(self, codec: Codec, data: memoryview, dtype: str | None = None) -> Sequence[memoryview]:
        parts = codec.encode(data) if dtype is None else codec.encode_elements(data, dtype)
        must = "it must return a sequence (not an iterator) of contiguous 1-D memoryviews of bytes"
        assert isinstance(parts, Sequence), f"`encode` returned a {type(parts).__name__}: {must}"
        for part in parts:
            assert isinstance(part, memoryview), f"`encode` returned a part that is a {type(part).__name__}: {must}"
            form = (part.ndim, part.itemsize, part.c_contiguous)
            assert form == (1, 1, True), f"`encode` returned a part with (ndim, itemsize, contiguous) {form}: {must}"
        return parts

    def unpack(self, codec: Codec, packed: bytes, nbytes: int, *, shift: int = 0) -> bytes:
        arena = bytearray([FILLING]) * (nbytes + 2 * GUARD + shift)
        begin = GUARD + shift
        with memoryview(arena) as whole, whole[begin : begin + nbytes] as place:
            try:
                codec.decode_into(memoryview(packed), place)
            finally:
                beside = arena[:begin] + arena[begin + nbytes :]
                assert set(beside) == {FILLING}, "The codec wrote outside the buffer given to `decode_into`"
            return bytes(place)

    def must_unpack(self, codec: Codec, packed: bytes, data: bytes, why: str = "", *, shift: int = 0) -> None:
        found = self.unpack(codec, packed, len(data), shift=shift)
        must_be_equal(found, data, f"The codec unpacked wrong bytes of {len(data)}{', ' * bool(why)}{why}")

    def refused_or(self, codec: Codec, packed: bytes, nbytes: int) -> bytes | None:
        try:
            return self.unpack(codec, packed, nbytes)
        except ValueError:
            return None
        except Exception as error:  # noqa: BLE001  reported as the test's failure
            kind = f"{type(error).__module__}.{type(error).__qualname__}"
            pytest.fail(f"For damaged bytes the codec raised {kind} ({error}): raise ValueError instead")

    def must_refuse(self, codec: Codec, packed: bytes, nbytes: int, why: str) -> None:
        if self.refused_or(codec, packed, nbytes) is not None:
            pytest.fail(f"The codec accepted damaged bytes; it must raise ValueError: {why}")

    def must_notice(self, codec: Codec, packed: bytes, data: bytes, why: str) -> None:
        found = self.refused_or(codec, packed, len(data))
        if found not in (None, data) and self.detects_damage:
            pytest.fail(f"The codec unpacked damaged bytes to another object: {why}. Add a checksum")

    def most_memory(self, work: Callable[[], object]) -> int:
        tracemalloc.start()
        try:
            work()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def test_its_name_fits_into_an_envelope(self, codec: Codec) -> None:
        self.must_be_named(codec.name)
        assert codec.name.isascii(), f"The codec's name {codec.name!r} must be ASCII"
        assert len(codec.name) <= MAX_CODEC_NAME, f"{codec.name!r} must have at most {MAX_CODEC_NAME} characters"

    def test_a_required_codec_binds_a_value_to_its_name(self, codec: Codec) -> None:
        if not self.use or not self.resolve()[0].required:
            pytest.skip("The codec is not `required`")
        data, place = CONTENTS["noise"], bytearray(len(CONTENTS["noise"]))
        name = ValueName(bytes(range(72)), bytes(range(16)), "a tenant")
        packed = memoryview(b"".join(codec.encode_named(memoryview(data), "", name)))
        assert packed.nbytes <= len(data) + MAX_OVERHEAD, f"The packed form is more than {MAX_OVERHEAD} bytes longer"
        assert codec.decode_named(packed, memoryview(place), name) is False, "What was packed just now is no old form"
        must_be_equal(place, data, "The codec unpacked wrong bytes")
        others = [name._replace(key=name.key[:at] + b"\xff" + name.key[at + 1 :]) for at in range(72)]
        others += [name._replace(layout=bytes(16)), name._replace(tenant="another"), name._replace(tenant="")]
        for other in others:
            with pytest.raises(ValueError):
                codec.decode_named(packed, memoryview(place), other)

    @pytest.mark.parametrize("content", CONTENTS)
    def test_what_is_packed_is_unpacked(self, codec: Codec, content: str) -> None:
        data = CONTENTS[content]
        packed = self.pack(codec, data)
        self.must_unpack(codec, packed, data, content)
        for again in (packed, packed + packed, packed[: len(packed) // 2], packed[:4] + CONTENTS["text"]):
            self.must_unpack(codec, self.pack(codec, again), again, "whose content is packed bytes")

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
                self.must_unpack(codec, packed, data[:nbytes], f"{content}, declared as elements of {dtype!r}")

    def test_a_batch_is_packed_before_it_is_sent(self, codec: Codec) -> None:
        objects = list(CONTENTS.values())
        batch = [self.parts_of(codec, memoryview(data)) for data in objects]
        packed = [b"".join(parts) for parts in batch]
        for data in reversed(objects):
            self.must_unpack(codec, self.pack(codec, data), data, "while the codec packs others")
        changed = sum(b"".join(parts) != before for parts, before in zip(batch, packed, strict=True))
        assert not changed, f"A later `encode` changed the packed bytes of {changed} objects: use a new buffer for each"
        for each, data in zip(packed, objects, strict=True):
            self.must_unpack(codec, each, data, "of a batch")

    def test_a_call_knows_nothing_of_others(self, make_codec: MakeCodec) -> None:
        """No state is kept outside the packed bytes; options may change the ratio, not the readability."""
        codecs = [make_codec(), make_codec()]
        if self.use and self.options:
            with contextlib.suppress(ConfigFieldError):  # there is none without options
                codecs.append(self.by_name({})())
        for writer, reader in itertools.permutations(codecs, 2):
            packed = {data: self.pack(writer, data) for data in CONTENTS.values()}
            for data, each in reversed(packed.items()):
                self.must_unpack(reader, each, data, "by another codec, in another order")

    def test_objects_that_differ_in_one_byte_are_different(self, codec: Codec) -> None:
        """What is remembered by length, ends, address or a part of the bytes is another object's."""
        held = bytearray(CONTENTS["noise"][:20_000])
        with memoryview(held) as view:
            for at in (0, 1, 63, 64, 4095, 4096, 9_999, 10_000, 19_935, 19_998, 19_999):
                held[at] ^= 0x55
                packed = b"".join(self.parts_of(codec, view))
                self.must_unpack(codec, packed, bytes(held), f"which differs from the object before in byte {at}")

    def test_it_keeps_nothing_of_its_calls(self, codec: Codec) -> None:
        def use(index: int) -> None:
            data = CONTENTS["numbers"][index : 8000 + index]
            self.must_unpack(codec, self.pack(codec, data), data)

        before = held()
        grown = self.grown(use, _TIMES, _TIMES)
        assert grown < _TIMES * 100, f"The codec keeps {grown} bytes after {_TIMES} objects; it must keep none"
        opened = len(held() - before)
        assert opened < _TIMES // 2, f"The codec left {opened} descriptors and threads open after {2 * _TIMES} objects"

    def test_what_another_process_packed_is_unpacked(self, codec: Codec) -> None:
        data = bytes(number * number % 251 for number in range(50_000))
        packed = self.elsewhere(codec, _ELSEWHERE, seed=1)
        self.must_unpack(codec, packed, data, "packed by another process")

    def test_a_call_is_not_disturbed_at_any_step(self, codec: Codec) -> None:
        """Before each instruction another thread packs and unpacks, and reads what the call was given."""
        data, others = CONTENTS["noise"][:1000], CONTENTS["text"][:777]
        packed_others = self.pack(codec, others)
        given = bytearray(data)
        seen: set[bytes] = set()

        def other() -> None:
            codec.encode(memoryview(others))
            codec.decode_into(memoryview(packed_others), memoryview(bytearray(len(others))))
            seen.add(bytes(given))

        packed = b"".join(interleaved(lambda: codec.encode(memoryview(given)), other))
        assert seen <= {data}, "`encode` changed the object while other threads read it: the object is read-only"
        given, place = bytearray(packed), bytearray(len(data))
        seen.clear()
        interleaved(lambda: codec.decode_into(memoryview(given), memoryview(place)), other)
        assert seen <= {packed}, "`decode_into` changed the packed bytes while other threads read them"
        must_be_equal(place, data, "Threads spoiled each other's bytes: share no buffer between calls")

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
                "`encode` changed the object, which belongs to the caller and which other threads may read"
            )

    @pytest.mark.parametrize("content", ["text", "numbers", "noise", "every pair"])
    def test_memory_may_begin_at_any_address(self, codec: Codec, content: str) -> None:
        """Objects and packed bytes may begin and end at any byte, and the packed form does not follow from where."""
        data = CONTENTS[content][:9001]
        held = bytearray(len(data) + 64)
        for shift in range(33):
            held[shift : shift + len(data)] = data
            with memoryview(held) as whole, whole[shift : shift + len(data)] as view:
                packed = b"".join(self.parts_of(codec, view))
            self.must_unpack(codec, packed, data, f"from and to an address moved by {shift}", shift=shift)
            moved = bytes(shift) + packed + b"\x99"
            place = bytearray(len(data))
            codec.decode_into(memoryview(moved)[shift:-1], memoryview(place))
            must_be_equal(place, data, f"The codec unpacked wrong bytes from an address moved by {shift} bytes")

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

    @pytest.mark.parametrize("content", CONTENTS)
    def test_another_length_is_refused(self, codec: Codec, content: str) -> None:
        data = CONTENTS[content]
        packed = self.pack(codec, data)
        for nbytes in {0, 1, len(data) // 2, len(data) - 1, len(data) + 1, 2 * len(data) + 1, _MIB} - {len(data), -1}:
            self.must_refuse(codec, packed, nbytes, f"an object of {len(data)} bytes, unpacked into {nbytes} bytes")

    @pytest.mark.parametrize("content", _SAMPLES)
    def test_what_is_cut_off_is_refused(self, codec: Codec, content: str) -> None:
        data = CONTENTS[content]
        packed = self.pack(codec, data)
        ends = {*range(min(len(packed), 64)), *range(max(0, len(packed) - 64), len(packed))}
        ends |= {len(packed) * part // 16 for part in range(16)}
        for end in sorted(ends):
            self.must_refuse(codec, packed[:end], len(data), f"only {end} of {len(packed)} packed bytes")
            if end:
                self.must_refuse(codec, packed[-end:], len(data), f"only the last {end} of {len(packed)} packed bytes")
        self.must_unpack(codec, packed, data, "after errors")

    @pytest.mark.parametrize("content", ["nothing", *_SAMPLES])
    def test_what_is_more_than_was_packed_is_refused(self, codec: Codec, content: str) -> None:
        data = CONTENTS[content]
        packed = self.pack(codec, data)
        for more in filter(None, (b"\0", b"\n", b"\xff", b"more", bytes(5000), packed, self.pack(codec, b"another"))):
            self.must_refuse(codec, packed + more, len(data), f"{len(more)} bytes more at the end of {len(packed)}")
            self.must_refuse(codec, more + packed, len(data), f"{len(more)} bytes more in front of {len(packed)}")

    @pytest.mark.parametrize("content", _SAMPLES)
    def test_every_kind_of_damage_is_noticed(self, codec: Codec, content: str) -> None:
        """As disks, networks and broken stores do it: a checksum that adds up notices only some of it."""
        data = CONTENTS[content]
        packed = self.pack(codec, data)
        for what, damaged in _damages(packed):
            if damaged != packed:
                self.must_notice(codec, damaged, data, what)

    def test_a_small_place_takes_little_memory(self, codec: Codec) -> None:
        packed = self.pack(codec, bytes(32 * _MIB))
        most = self.most_memory(lambda: self.must_refuse(codec, packed, 1000, "32 MiB, unpacked into 1000 bytes"))
        assert most < 2 * len(packed) + 4 * _MIB, f"The codec allocated {most} bytes to refuse 1000: check sizes first"

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
                    assert most < bound, f"{most} bytes allocated: the codec trusted {claim} at byte {at}"
