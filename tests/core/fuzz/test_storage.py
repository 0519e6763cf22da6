"""What anybody may have written into L2: envelopes, packed values, namespace records."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.tier import Outcome, PackedKey, Tier
from kvframework.storage import namespaces
from kvframework.storage.l2.sealed_tier import CodecTable, L2Store
from kvframework.storage.namespaces import HEADER_BYTES, NamespaceRecord, seal
from tests.core.fuzz.bounds import bounded, check_words
from tests.core.fuzz.effort import fuzzed
from tests.core.fuzz.mutation import mutated
from tests.core.fuzz.strategies import mangled, mutations, randoms
from tests.core.storage.test_namespaces import records

KEY = bytes(range(72))
LAYOUT = bytes(range(16))
OBJECT_BYTES = 96
codec_names = st.sampled_from(["none", "zstd", "x", "sixteen-letters-"]) | st.text(
    st.characters(max_codepoint=127), max_size=16
)


@st.composite
def values(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Header and what follows, as somebody stored it: sealed well, then damaged or not; or made up."""
    packed = draw(st.binary(max_size=OBJECT_BYTES))
    key = draw(st.sampled_from([KEY, bytes(72)]))
    size = draw(st.sampled_from([OBJECT_BYTES, len(packed), 0, 1 << 63]))
    header = seal(
        key, [packed], object_bytes=size, codec=draw(codec_names), layout=draw(st.sampled_from([LAYOUT, bytes(16)]))
    )
    header = draw(st.just(header) | mangled(st.just(header)) | st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
    return header, draw(st.just(packed) | mangled(st.just(packed)))


@fuzzed
@given(values(), st.sampled_from([LAYOUT, bytes(16), bytes(range(1, 17))]))
def test_a_value_is_opened_or_damaged(value: tuple[bytes, bytes], layout: bytes) -> None:
    header, packed = value
    place = memoryview(bytearray(OBJECT_BYTES))
    place[: len(packed)] = packed[:OBJECT_BYTES]
    with bounded(OBJECT_BYTES):
        try:
            received = len(header) + min(len(packed), OBJECT_BYTES)
            codec, found = namespaces.unseal(header, KEY, place, received=received, layout=layout)
        except namespaces.Damaged as error:
            check_words(error, 200)
            return
    assert len(codec) <= 16
    assert found.obj is place.obj
    assert found.nbytes <= OBJECT_BYTES


class Told(Tier):
    """Holds one value, whatever is asked for."""

    name = "told"

    def __init__(self, header: bytes, packed: bytes) -> None:
        self.header, self.packed, self.deleted = header, packed, 0

    def get_into(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[int | Outcome]:
        for head, body in parts:
            head[:] = self.header[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
            body[: len(self.packed)] = self.packed[: body.nbytes]
        return [HEADER_BYTES + min(len(self.packed), parts[0][1].nbytes) for _ in keys]

    def delete(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        self.deleted += 1
        return [Outcome.DELETED for _ in keys]

    def contains(self, keys: Sequence[PackedKey], *, deadline: float) -> list[Outcome]:
        raise NotImplementedError

    def put(
        self, keys: Sequence[PackedKey], parts: Sequence[Sequence[memoryview]], *, deadline: float
    ) -> list[Outcome]:
        raise NotImplementedError

    def ping(self, *, deadline: float) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


def read(header: bytes, packed: bytes, size: int = OBJECT_BYTES) -> tuple[bool, bytes]:
    """Whether the store took it for good, and what it left in the object's place. Its neighbours stay as they are."""
    zstd = pytest.importorskip("kvf_codecs.zstd")
    store = L2Store(Told(header, packed), timeout_s=5, codecs=CodecTable({"zstd": lambda: zstd.ZstdCodec(1)}))
    arena = memoryview(bytearray(b"\xaa" * (size + 64)))
    good = store.get([KEY], [arena[32 : 32 + size]])
    assert bytes(arena[:32]) == bytes(arena[-32:]) == b"\xaa" * 32
    return good == [True], bytes(arena[32 : 32 + size])


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("kvframework.storage.l2.sealed_tier").setLevel(logging.CRITICAL)


@fuzzed
@given(values())
def test_a_store_reads_a_hit_or_a_miss(value: tuple[bytes, bytes]) -> None:
    good, _ = read(*value)
    assert isinstance(good, bool)


@fuzzed
@given(st.binary(max_size=OBJECT_BYTES), st.data())
def test_a_packed_value_is_what_was_packed_or_a_miss(content: bytes, data: st.DataObject) -> None:
    """Sealed with a right checksum, as by somebody who may write into the store: the codec has to hold."""
    zstandard = pytest.importorskip("zstandard")
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(content.ljust(OBJECT_BYTES, b"k"))
    frame = data.draw(st.just(frame) | mangled(st.just(frame)))[:OBJECT_BYTES]
    good, found = read(seal(KEY, [frame], object_bytes=OBJECT_BYTES, codec="zstd"), frame)
    if good:
        assert zstandard.ZstdDecompressor().decompress(frame) == found


@fuzzed
@given(
    mutations(NamespaceRecord) | st.builds(mutated, randoms, records) | st.binary(max_size=200),
    st.sampled_from([0, 0, -3, 1, 1 << 31]),
    st.booleans(),
)
def test_a_record_is_plausible_or_a_miss(packed: bytes, off: int, padded: bool) -> None:
    value = min(max(len(packed) + off, 0), (1 << 32) - 1).to_bytes(4, "little") + packed
    value = value.ljust(namespaces.RECORD_BYTES, b"\0")[: namespaces.RECORD_BYTES] if padded else value
    with bounded(len(value)):
        record = namespaces.decode_record(value)
    if record is None:
        return
    assert record.world_size >= 1
    assert record.desc.chunk_tokens >= 1
    assert all(group.window >= 0 and 1 <= group.nbytes <= 1 << 30 for group in record.desc.groups)
    assert len(namespaces.layout_fingerprint(record.desc)) == 16
