"""The envelope of L2 values: nothing but what was sealed, under the key it was sealed for, passes."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.layout import GroupDesc, MemoryLayoutDesc
from kvframework.storage.namespaces import HEADER_BYTES, Damaged, layout_fingerprint, seal, unseal
from tests.core.storage.memory import packed_key

KEY = packed_key(7)
LAYOUT = layout_fingerprint(MemoryLayoutDesc(16, (GroupDesc((2, 1, 16, 8), "bfloat16"),)))
payloads = st.binary(max_size=200)
keys = st.binary(min_size=72, max_size=72)


def opened(
    header: bytes, key: bytes, place: bytes, layout: bytes = LAYOUT, *, stale: int = 0
) -> tuple[str, bytes] | None:
    """Codec and packed bytes, None for what is damaged. The last `stale` bytes of `place` were there before."""
    received = len(header) + len(place) - stale
    try:
        codec, packed = unseal(header, key, memoryview(bytearray(place)), received=received, layout=layout)
    except Damaged:
        return None
    return codec, bytes(packed)


def sealed(key: bytes, payload: bytes) -> bytes:
    return seal(key, [payload], object_bytes=len(payload), layout=LAYOUT)


@given(keys, payloads, st.integers(0, 100), st.binary(min_size=100, max_size=100))
def test_what_a_codec_packed_lies_at_the_beginning_of_its_place(
    key: bytes, packed: bytes, more: int, stale: bytes
) -> None:
    size = len(packed) + more
    header = seal(key, [packed[:3], packed[3:]], object_bytes=size, codec="some-codec", layout=LAYOUT)
    assert opened(header, key, packed + stale[:more], stale=more) == ("some-codec", packed)
    assert opened(header, key, packed + stale[:more] + b"x", stale=more + 1) is None, "an object of another size"


@given(keys, payloads, st.sampled_from(["none", "some-codec"]), st.data())
def test_no_other_length_passes_even_if_older_bytes_complete_it(
    key: bytes, packed: bytes, codec: str, data: st.DataObject
) -> None:
    more = 0 if codec == "none" else data.draw(st.integers(0, 50))
    place = packed + bytes(more)
    header = seal(key, [packed], object_bytes=len(place), codec=codec, layout=LAYOUT)
    stale = data.draw(st.integers(-10, HEADER_BYTES + len(place)))
    assert (opened(header, key, place, stale=stale) is not None) == (stale == more)


def test_every_flipped_bit_is_damage() -> None:
    payload = bytes(range(48))
    for value in (sealed(KEY, payload) + payload, seal(KEY, [payload], object_bytes=48, codec="zstd") + payload):
        for bit in range(len(value) * 8):
            damaged = bytearray(value)
            damaged[bit // 8] ^= 1 << bit % 8
            assert opened(bytes(damaged[:HEADER_BYTES]), KEY, bytes(damaged[HEADER_BYTES:])) is None, f"bit {bit}"


@given(keys, keys, payloads)
def test_a_value_under_another_key_is_damage(key: bytes, other: bytes, payload: bytes) -> None:
    assert (opened(sealed(key, payload), other, payload) is not None) == (key == other)


@given(payloads, st.data())
def test_a_truncated_or_longer_value_is_damage(payload: bytes, data: st.DataObject) -> None:
    header = sealed(KEY, payload)
    cut = data.draw(st.integers(0, HEADER_BYTES - 1))
    assert opened(header[:cut], KEY, payload) is None
    assert opened(header + b"\0", KEY, payload) is None
    assert opened(header, KEY, payload + b"\0") is None
    if payload:
        assert opened(header, KEY, payload[: data.draw(st.integers(0, len(payload) - 1))]) is None


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), payloads)
def test_random_headers_are_damage(header: bytes, payload: bytes) -> None:
    assert opened(header, KEY, payload) is None


@pytest.mark.parametrize(
    "other",
    [
        MemoryLayoutDesc(32, (GroupDesc((2, 1, 16, 8), "bfloat16"),)),
        MemoryLayoutDesc(16, (GroupDesc((1, 2, 16, 8), "bfloat16"),)),
        MemoryLayoutDesc(16, (GroupDesc((2, 1, 16, 8), "float16"),)),
        MemoryLayoutDesc(16, (GroupDesc((2, 1, 16, 8), "bfloat16", "opaque:amx"),)),
        MemoryLayoutDesc(16, (GroupDesc((2, 1, 16, 8), "bfloat16", window=16),)),
        MemoryLayoutDesc(16, (GroupDesc((2, 1, 16, 8), "bfloat16"),) * 2),
    ],
)
def test_a_value_of_another_layout_is_damage(other: MemoryLayoutDesc) -> None:
    assert opened(sealed(KEY, b"kv"), KEY, b"kv", layout_fingerprint(other)) is None
    assert opened(sealed(KEY, b"kv"), KEY, b"kv", bytes(16)) is not None, "not told"


def test_the_format_is_as_documented() -> None:
    payload = b"kv" * 10
    fields = struct.pack("<4sHH16s16s16sQQ", b"KVFO", 2, 0, KEY[:16], LAYOUT, b"none", 20, 20)
    assert sealed(KEY, payload) == fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(KEY + fields + payload))
