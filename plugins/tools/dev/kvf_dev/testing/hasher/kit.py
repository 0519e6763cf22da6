"""The settings and fixtures that the author of a key hasher gives to the kit, and functions its tests share."""

from __future__ import annotations

import array
import sys
from collections.abc import Callable, Iterable, Sequence

import pytest

from kvf_dev.testing.making import NamedKit
from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, HasherProvider, KeyHasher

MakeHasher = Callable[[], KeyHasher]

# Tokens of a chunk: the smallest, an odd number, and those that servers use.
CHUNKS = (1, 3, 16, 256)


class HasherKit(NamedKit):
    """Settings and fixtures of the kit. An author must give either `use` or a `make_hasher` fixture."""

    _descriptor = HasherProvider

    @pytest.fixture
    def make_hasher(self) -> MakeHasher:
        """Return a factory of hashers; an engine and the server each make their own."""
        return self.by_name()

    @pytest.fixture
    def hasher(self, make_hasher: MakeHasher) -> KeyHasher:
        return make_hasher()


def packed(tokens: Iterable[int]) -> bytes:
    """Pack tokens as engines send them: little-endian u32."""
    words = array.array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    assert words.itemsize == TOKEN_BYTES
    return words.tobytes()


def mixed(count: int) -> list[int]:
    """Return different token ids of all 32 bits, the first ones in the order of their low bits."""
    return [(number * 2654435761 + (number << 3)) % 2**32 for number in range(1, count + 1)]


def split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def must_change(before: bytes, after: bytes, chunk: int, what: str) -> None:
    """Fail unless exactly the digests from `chunk` on are others."""
    __tracebackhide__ = True
    one, other = split(before), split(after)
    if len(one) != len(other):
        pytest.fail(f"{what}: {len(other)} digests instead of {len(one)}")
    for index, (was, became) in enumerate(zip(one, other, strict=True)):
        if index < chunk and was != became:
            pytest.fail(f"{what}, which is in chunk {chunk}, changes the digest of chunk {index} before it")
        if index >= chunk and was == became:
            pytest.fail(f"{what}, which is in chunk {chunk}, does not change the digest of chunk {index}")


def must_equal(found: bytes, expected: bytes, why: str) -> None:
    """Fail with `why` and the first digest that differs."""
    __tracebackhide__ = True
    if type(found) is not bytes:
        pytest.fail(f"digests are `bytes`, not {type(found).__name__}")
    one, other = split(found), split(expected)
    if len(one) != len(other):
        pytest.fail(f"{why}: {len(one)} digests instead of {len(other)}")
    for index in range(len(one)):
        if one[index] != other[index]:
            pytest.fail(f"{why}: the digest of chunk {index} of {len(one)} is another")


def must_differ(named: Sequence[tuple[object, bytes]], what: str) -> None:
    """Fail where two of the (name, digests) pairs end with the same digest."""
    __tracebackhide__ = True
    seen: dict[bytes, object] = {}
    for name, digests in named:
        if (last := digests[-DIGEST_BYTES:]) in seen:
            pytest.fail(f"{what}: two requests share a digest, {seen[last]} and {name}")
        seen[last] = name
