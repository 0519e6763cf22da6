"""The envelope of L2 values: nothing but what was sealed, under the key it was sealed for, passes."""

from __future__ import annotations

import struct

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvframework.storage.envelope import HEADER_BYTES, defect, seal
from tests.storage.memory import packed_key

KEY = packed_key(7)
payloads = st.binary(max_size=200)
keys = st.binary(min_size=72, max_size=72)


@given(keys, payloads)
def test_what_was_sealed_passes(key: bytes, payload: bytes) -> None:
    header = seal(key, payload)
    assert len(header) == HEADER_BYTES == 64
    assert defect(header, key, payload) is None
    assert defect(bytearray(header), key, memoryview(payload)) is None


def test_every_flipped_bit_is_a_defect() -> None:
    payload = bytes(range(48))
    value = seal(KEY, payload) + payload
    for bit in range(len(value) * 8):
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << bit % 8
        assert defect(damaged[:HEADER_BYTES], KEY, damaged[HEADER_BYTES:]) is not None, f"bit {bit}"


@given(keys, keys, payloads)
def test_a_value_under_another_key_is_a_defect(key: bytes, other: bytes, payload: bytes) -> None:
    assert (defect(seal(key, payload), other, payload) is None) == (key == other)


@given(payloads, st.data())
def test_a_truncated_or_longer_value_is_a_defect(payload: bytes, data: st.DataObject) -> None:
    header = seal(KEY, payload)
    cut = data.draw(st.integers(0, HEADER_BYTES - 1))
    assert defect(header[:cut], KEY, payload) is not None
    assert defect(header + b"\0", KEY, payload) is not None
    assert defect(header, KEY, payload + b"\0") is not None
    if payload:
        assert defect(header, KEY, payload[: data.draw(st.integers(0, len(payload) - 1))]) is not None


@given(st.binary(min_size=64, max_size=64), payloads)
def test_random_headers_are_defects(header: bytes, payload: bytes) -> None:
    assert defect(header, KEY, payload) is not None


def test_the_format_is_as_documented() -> None:
    payload = b"kv" * 10
    checksum = xxhash.xxh3_64_intdigest(KEY + payload)
    expected = struct.pack("<4sHH16s16sQQQ", b"KVFO", 1, 0, KEY[:16], b"none", 20, 20, checksum)
    assert seal(KEY, payload) == expected
