"""The kit over key hashers that are wrong in one way each. Run by pytest outside of the repository; every class but the
first must fail."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping

import pytest

from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, Buffer, KeyHasher
from kvframework.testing import HasherConformance
from kvframework.testing.hasher import MakeHasher

Extras = Mapping[int, bytes] | None


class Right(KeyHasher):
    name = "right"
    fingerprint = "right/1"
    root = bytes(DIGEST_BYTES)

    def chunk_digests(self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None) -> bytes:
        view, step, digest, digests = memoryview(tokens).cast("B"), chunk_tokens * TOKEN_BYTES, parent or self.root, []
        for index in range(view.nbytes // step):
            digest = self.one(digest, (extras or {}).get(index, b""), bytes(view[index * step : (index + 1) * step]))
            digests.append(digest)
        return b"".join(digests)

    def one(self, parent: bytes, extra: bytes, chunk: bytes) -> bytes:
        return hashlib.blake2b(parent + extra + chunk, digest_size=DIGEST_BYTES).digest()


class TestRightHasher(HasherConformance):
    @pytest.fixture
    def make_hasher(self) -> MakeHasher:
        return Right


class TestNoHasher(HasherConformance):
    pass


class Planted(HasherConformance):
    Bug: type[KeyHasher]

    @pytest.fixture
    def make_hasher(self) -> MakeHasher:
        return self.Bug


class TestForgetsThePrefix(Planted):
    class Bug(Right):
        def one(self, parent: bytes, extra: bytes, chunk: bytes) -> bytes:
            return super().one(b"", extra, chunk)


class TestIgnoresTheParentOfACall(Planted):
    class Bug(Right):
        def chunk_digests(
            self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None
        ) -> bytes:
            return super().chunk_digests(tokens, chunk_tokens, extras=extras)


class TestHashesTheRestToo(Planted):
    class Bug(Right):
        def chunk_digests(
            self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None
        ) -> bytes:
            rest = -memoryview(tokens).nbytes % (chunk_tokens * TOKEN_BYTES)
            return super().chunk_digests(bytes(tokens) + bytes(rest), chunk_tokens, parent=parent, extras=extras)


class TestTokensOf16Bits(Planted):
    class Bug(Right):
        def one(self, parent: bytes, extra: bytes, chunk: bytes) -> bytes:
            return super().one(parent, extra, b"".join(chunk[at : at + 2] for at in range(0, len(chunk), TOKEN_BYTES)))


class TestAddsTokensUp(Planted):
    class Bug(Right):
        def one(self, parent: bytes, extra: bytes, chunk: bytes) -> bytes:
            words = memoryview(chunk).cast("I")
            return super().one(parent, extra, sum(words).to_bytes(16, "little") + bytes(len(words)))


class TestOnlyAFewBytes(Planted):
    class Bug(Right):
        def one(self, parent: bytes, extra: bytes, chunk: bytes) -> bytes:
            return super().one(parent, extra, chunk)[:8].ljust(DIGEST_BYTES, b"\0")


class TestTheSameBytesAgain(Planted):
    class Bug(Right):
        def one(self, parent: bytes, extra: bytes, chunk: bytes) -> bytes:
            return super().one(parent, extra, chunk)[:16] * 2


class TestPythonsHash(Planted):
    class Bug(Right):
        def one(self, parent: bytes, extra: bytes, chunk: bytes) -> bytes:
            return super().one(hash((parent, chunk)).to_bytes(8, "little", signed=True), extra, chunk)


class TestIgnoresExtras(Planted):
    class Bug(Right):
        def one(self, parent: bytes, extra: bytes, chunk: bytes) -> bytes:
            return super().one(parent, b"", chunk)


class TestExtrasTakenForAParent(Planted):
    class Bug(Right):
        root = b""


class TestExtrasInTheOrderGiven(Planted):
    """All of them at the first chunk."""

    class Bug(Right):
        def chunk_digests(
            self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None
        ) -> bytes:
            everything = b"".join((extras or {}).values())
            return super().chunk_digests(tokens, chunk_tokens, parent=parent, extras={0: everything})


class TestExtrasByTheRequestsIndex(Planted):
    """It remembers how far it was."""

    class Bug(Right):
        done = 0

        def chunk_digests(
            self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None
        ) -> bytes:
            base = self.done if parent else 0
            here = {index - base: extra for index, extra in (extras or {}).items()}
            digests = super().chunk_digests(tokens, chunk_tokens, parent=parent, extras=here)
            self.done = base + len(digests) // DIGEST_BYTES
            return digests


class TestRaisesOnALaterExtra(Planted):
    class Bug(Right):
        def chunk_digests(
            self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None
        ) -> bytes:
            chunks = memoryview(tokens).nbytes // (chunk_tokens * TOKEN_BYTES)
            assert all(index < chunks for index in extras or {}), "an extra behind the tokens"
            return super().chunk_digests(tokens, chunk_tokens, parent=parent, extras=extras)


class TestCountsElementsNotBytes(Planted):
    class Bug(Right):
        def chunk_digests(
            self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None
        ) -> bytes:
            return super().chunk_digests(
                memoryview(tokens)[: len(tokens)].tobytes()[: len(tokens)], chunk_tokens, parent=parent, extras=extras
            )


class TestKeepsTheTokens(Planted):
    class Bug(Right):
        def chunk_digests(
            self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None
        ) -> bytes:
            self.last = memoryview(tokens)
            return super().chunk_digests(tokens, chunk_tokens, parent=parent, extras=extras)


class TestKeepsTheParentInItself(Planted):
    class Bug(Right):
        def chunk_digests(
            self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None
        ) -> bytes:
            self.digest = parent or self.root
            time.sleep(0.001)
            return super().chunk_digests(tokens, chunk_tokens, parent=parent, extras=extras)

        def one(self, parent: bytes, extra: bytes, chunk: bytes) -> bytes:
            self.digest = super().one(self.digest, extra, chunk)
            return self.digest


class TestAnotherFingerprintEachTime(Planted):
    class Bug(Right):
        made = 0

        def __init__(self) -> None:
            type(self).made += 1
            self.fingerprint = f"right/{self.made}"


class TestAnswersABytearray(Planted):
    class Bug(Right):
        def chunk_digests(
            self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None
        ) -> bytes:
            return bytearray(super().chunk_digests(tokens, chunk_tokens, parent=parent, extras=extras))  # type: ignore[return-value]
