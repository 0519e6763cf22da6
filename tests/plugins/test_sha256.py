"""The SHA-256 key hasher: known digests, and the properties that the cache stands on."""

from __future__ import annotations

import array
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_hashers import Sha256
from kvframework.errors import RequestError

HASHER = Sha256()

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(lambda ids: array.array("I", ids).tobytes())
chunk_sizes = st.integers(1, 9)
extras = st.dictionaries(st.integers(0, 12), st.binary(max_size=20), max_size=4)


def test_the_bytes_that_are_hashed_are_fixed() -> None:
    ids = array.array("I", range(8)).tobytes()
    root = hashlib.sha256(b"kvframework/sha256/1").digest()
    first = hashlib.sha256(root + b"\0\0\0\0" + ids[:16]).digest()
    second = hashlib.sha256(first + b"\3\0\0\0" + b"img" + ids[16:]).digest()
    assert HASHER.chunk_digests(ids, 4, extras={1: b"img"}) == first + second
    assert first.hex() == "7fb709996c80388903c2a9872456d5d17e367dd206e4815387c207b570319721"
    assert HASHER.fingerprint == "sha256/1"


@given(tokens=tokens, chunk=chunk_sizes, extras=extras)
def test_there_is_one_digest_for_each_whole_chunk(tokens: bytes, chunk: int, extras: dict[int, bytes]) -> None:
    assert len(HASHER.chunk_digests(tokens, chunk, extras=extras)) == 32 * (len(tokens) // (4 * chunk))


@given(tokens=tokens, chunk=chunk_sizes, extras=extras, cut=st.integers(0, 160))
def test_the_digests_of_a_prefix_are_a_prefix(tokens: bytes, chunk: int, extras: dict[int, bytes], cut: int) -> None:
    whole = HASHER.chunk_digests(tokens, chunk, extras=extras)
    assert whole.startswith(HASHER.chunk_digests(tokens[:cut], chunk, extras=extras))


@given(tokens=tokens, chunk=chunk_sizes, extras=extras, split=st.integers(0, 40))
def test_going_on_from_a_parent_equals_one_call(
    tokens: bytes, chunk: int, extras: dict[int, bytes], split: int
) -> None:
    split = min(split, len(tokens) // (4 * chunk))
    head = HASHER.chunk_digests(tokens[: split * chunk * 4], chunk, extras=extras)
    rest = {index - split: extra for index, extra in extras.items() if index >= split}
    tail = HASHER.chunk_digests(tokens[split * chunk * 4 :], chunk, parent=head[-32:], extras=rest)
    assert head + tail == HASHER.chunk_digests(tokens, chunk, extras=extras)


@given(tokens=tokens, chunk=chunk_sizes, one=extras, other=extras)
def test_digests_differ_exactly_from_the_first_chunk_whose_extra_differs(
    tokens: bytes, chunk: int, one: dict[int, bytes], other: dict[int, bytes]
) -> None:
    ours = HASHER.chunk_digests(tokens, chunk, extras=one)
    theirs = HASHER.chunk_digests(tokens, chunk, extras=other)
    differ = False
    for index in range(len(ours) // 32):
        differ = differ or one.get(index, b"") != other.get(index, b"")
        assert (ours[index * 32 : index * 32 + 32] != theirs[index * 32 : index * 32 + 32]) == differ


@given(tokens=tokens, chunk=chunk_sizes, position=st.integers(0, 159), flip=st.integers(1, 255))
def test_one_changed_byte_changes_its_chunk_and_all_behind_it(
    tokens: bytes, chunk: int, position: int, flip: int
) -> None:
    changed = bytearray(tokens)
    if position >= len(changed):
        return
    changed[position] ^= flip
    before, after = HASHER.chunk_digests(tokens, chunk), HASHER.chunk_digests(changed, chunk)
    first = position // (4 * chunk)
    for index in range(len(before) // 32):
        assert (before[index * 32 : index * 32 + 32] == after[index * 32 : index * 32 + 32]) == (index < first)


def test_an_extra_is_not_taken_for_tokens() -> None:
    assert HASHER.chunk_digests(b"abcdefgh", 2) != HASHER.chunk_digests(b"efgh", 1, extras={0: b"abcd"})


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, lambda data: memoryview(data).cast("I")])
def test_any_buffer_of_the_tokens_gives_the_same(form: object) -> None:
    data = bytes(range(64))
    assert HASHER.chunk_digests(form(data), 4) == HASHER.chunk_digests(data, 4)


@pytest.mark.parametrize(
    "arguments",
    [{"parent": b"short"}, {"parent": bytes(33)}, {"chunk_tokens": 0}, {"chunk_tokens": -1}, {"extras": {-1: b"x"}}],
)
def test_nonsense_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        HASHER.chunk_digests(**({"tokens": bytes(64), "chunk_tokens": 4} | arguments))
