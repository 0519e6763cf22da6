"""The key hashers: what every hasher must do, their bytes, and what they refuse. The hash kernel against `hashlib`,
over chunks of any length. Where it was not built, or not for this processor, these skip."""

from __future__ import annotations

import array
import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_dev.testing import HasherConformance
from kvf_hashers import SglangPages, Sha256, sha256
from kvf_hashers.sha256 import chain_by_hashlib, load_chain
from kvframework.api.hasher import KeyHasher
from kvframework.errors import RequestError

HASHER = Sha256()


PAGES = SglangPages()


class TestSha256(HasherConformance):
    use = "sha256"


class TestSglangPages(HasherConformance):
    use = "sglang"


def test_the_bytes_that_are_hashed_are_fixed() -> None:
    ids = array.array("I", range(8)).tobytes()
    root = hashlib.sha256(b"kvframework/sha256/1").digest()
    first = hashlib.sha256(root + b"\0\0\0\0" + ids[:16]).digest()
    second = hashlib.sha256(first + b"\3\0\0\0" + b"img" + ids[16:]).digest()
    assert HASHER.chunk_digests(ids, 4, extras={1: b"img"}) == first + second
    assert first.hex() == "7fb709996c80388903c2a9872456d5d17e367dd206e4815387c207b570319721"
    assert HASHER.fingerprint == "sha256/1"


def test_the_bytes_of_sglangs_pages_are_fixed() -> None:
    ids = array.array("I", range(8)).tobytes()
    first = hashlib.sha256(ids[:16]).digest()
    second = hashlib.sha256(first + ids[16:]).digest()
    assert PAGES.chunk_digests(ids, 4) == first + second
    assert PAGES.chunk_digests(ids[16:], 4, parent=first) == second
    folded = hashlib.sha256(b"kvframework/sglang-pages/extra/1\0\x20" + first + b"img").digest()
    assert PAGES.chunk_digests(ids, 4, extras={1: b"img"}) == first + hashlib.sha256(folded + ids[16:]).digest()
    assert PAGES.fingerprint == "sglang/1"


def test_an_extra_is_not_taken_for_tokens() -> None:
    assert HASHER.chunk_digests(b"abcdefgh", 2) != HASHER.chunk_digests(b"efgh", 1, extras={0: b"abcd"})


@pytest.mark.parametrize("hasher", [HASHER, PAGES], ids=["sha256", "sglang"])
def test_extras_of_no_chunk_are_refused(hasher: KeyHasher) -> None:
    with pytest.raises(RequestError):
        hasher.chunk_digests(bytes(64), 4, extras={-1: b"x"})


CHAIN = load_chain()

pytestmark = pytest.mark.skipif(CHAIN is chain_by_hashlib, reason="the hash kernel was not built for this processor")


def content(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


@pytest.mark.parametrize("gap", [0, 4, 16])
@pytest.mark.parametrize("parent", [b"", content(32)], ids=["no parent", "parent"])
def test_chunks_of_each_length_up_to_some_blocks(parent: bytes, gap: int) -> None:
    """Each length of a message's end, where the padding needs another block or none."""
    tokens = memoryview(content(1200))
    for step in range(4, 400, 4):
        assert CHAIN(tokens, step, parent, gap) == chain_by_hashlib(tokens, step, parent, gap)


@given(st.integers(1, 3000), st.integers(0, 40), st.booleans())
def test_long_chains(chunk_tokens: int, chunks: int, writable: bool) -> None:
    tokens = content(chunk_tokens * chunks * 4 + 3)
    view = memoryview(bytearray(tokens) if writable else tokens)[3:]
    assert CHAIN(view, chunk_tokens * 4, b"", 4) == chain_by_hashlib(view, chunk_tokens * 4, b"", 4)


def test_a_message_by_the_standards_own_example() -> None:
    assert CHAIN(memoryview(b"abc" * 2), 3, b"", 0)[:32].hex() == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    assert CHAIN(memoryview(b""), 3, b"", 0) == b""


def test_what_is_no_chain_is_refused() -> None:
    for parent, gap in ((bytes(33), 0), (b"", 17)):
        with pytest.raises(ValueError, match="the parent has"):
            CHAIN(memoryview(bytes(8)), 4, parent, gap)


@given(
    st.integers(1, 20),
    st.integers(0, 12),
    st.sampled_from([b"", hashlib.sha256(b"parent").digest()]),
    st.dictionaries(st.integers(0, 13), st.binary(max_size=70), max_size=6),
)
@pytest.mark.parametrize("hasher", [Sha256(), SglangPages()], ids=["sha256", "sglang"])
def test_hashers_have_the_same_digests_without_it(
    hasher: KeyHasher, chunk_tokens: int, chunks: int, parent: bytes, extras: dict[int, bytes]
) -> None:
    tokens = content((chunk_tokens * chunks + chunk_tokens // 2) * 4)
    digests = hasher.chunk_digests(tokens, chunk_tokens, parent=parent, extras=extras)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sha256, "load_chain", lambda: chain_by_hashlib)
        assert hasher.chunk_digests(tokens, chunk_tokens, parent=parent, extras=extras) == digests
    assert len(digests) == 32 * chunks
