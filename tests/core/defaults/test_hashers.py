"""The key hashers: what every hasher must do, their bytes, and what they refuse."""

from __future__ import annotations

import array
import hashlib

import pytest

from kvf_dev.testing import HasherConformance
from kvf_hashers import SglangPages, Sha256
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
