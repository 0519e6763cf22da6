"""The hasher kit passes a correct hasher, and each planted bug fails its test with the promise that it breaks.

A bug is one line of `BUGS`: what is wrong, the test that must fail, and what it says. `one` replaces the digest of a
chunk, `call` the whole call; both get the correct hasher first.
"""
# ruff: noqa: ARG005, B905, E501  the arguments of all bugs are the same

from __future__ import annotations

import binascii
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvf_dev.testing import HasherConformance
from kvf_dev.testing.hasher import MakeHasher
from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, Buffer, KeyHasher
from kvframework.errors import RequestError
from tests.dev.kits.kit_run import must_fail

Extras = Mapping[int, bytes] | None


class Right(KeyHasher):
    name = "right"
    fingerprint = "right/1"
    root = bytes(DIGEST_BYTES)

    def chunk_digests(self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None) -> bytes:
        self.refuse(parent, chunk_tokens)
        view, step, digest, digests = memoryview(tokens).cast("B"), chunk_tokens * TOKEN_BYTES, parent or self.root, []
        for index in range(view.nbytes // step):
            digest = self.one(digest, (extras or {}).get(index, b""), bytes(view[index * step : (index + 1) * step]))
            digests.append(digest)
        return b"".join(digests)

    def refuse(self, parent: bytes, chunk_tokens: int) -> None:
        if len(parent) not in (0, DIGEST_BYTES) or chunk_tokens < 1:
            raise RequestError("a parent that is no digest, or a chunk without tokens")

    def one(self, parent: bytes, extra: bytes, chunk: bytes) -> bytes:
        return hashlib.blake2b(parent + extra + chunk, digest_size=DIGEST_BYTES).digest()


class TestRightHasher(HasherConformance):
    @pytest.fixture
    def make_hasher(self) -> MakeHasher:
        return Right


def one(digest: Callable[..., bytes], /, **more: object) -> type[Right]:
    """A hasher whose chunk has the digest of `digest(right, parent, extra, chunk)`."""
    return type("Bug", (Right,), {"one": lambda self, *each: digest(super(type(self), self).one, *each), **more})


def call(answer: Callable[..., Any], /, **more: object) -> type[Right]:
    """A hasher whose call answers `answer(right, tokens, chunk, parent, extras)`; `right` has the same arguments."""

    def chunk_digests(
        self: Right, tokens: Any, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None
    ) -> Any:
        def right(tokens: Any, chunk: int, parent: bytes, extras: Extras) -> bytes:
            return Right.chunk_digests(self, tokens, chunk, parent=parent, extras=extras)

        return answer(right, tokens, chunk_tokens, parent, extras)

    return type("Bug", (Right,), {"chunk_digests": chunk_digests, **more})


def words(chunk: bytes) -> list[int]:
    return memoryview(chunk).cast("I").tolist()


def remembered(key: Callable[..., object]) -> type[Right]:
    """A hasher that keeps answers by a key that leaves something out."""

    class Remembers(Right):
        def __init__(self) -> None:
            self.known: dict[object, bytes] = {}

        def chunk_digests(self, tokens: Any, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None) -> bytes:
            known = key(tokens, chunk_tokens, parent, str(extras))
            if known not in self.known:
                self.known[known] = super().chunk_digests(tokens, chunk_tokens, parent=parent, extras=extras)
            return self.known[known]

    return Remembers


def far(right: Callable[..., bytes], tokens: Any, chunk: int, parent: bytes, extras: Extras, last: int) -> bytes:
    """The chain begins again behind `last` chunks."""
    step = last * chunk * TOKEN_BYTES
    raw = bytes(memoryview(tokens).cast("B"))
    pieces = [right(raw[at : at + step], chunk, parent if not at else b"", extras) for at in range(0, len(raw), step)]
    return b"".join(pieces)


class KeepsTheParentInItself(Right):
    def chunk_digests(self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None) -> bytes:
        self.digest = parent or self.root
        time.sleep(0.001)
        return super().chunk_digests(tokens, chunk_tokens, parent=parent, extras=extras)

    def one(self, parent: bytes, extra: bytes, chunk: bytes) -> bytes:
        self.digest = super().one(self.digest, extra, chunk)
        return self.digest


class ExtrasByTheRequestsIndex(Right):
    """It remembers how far it was."""

    done = 0

    def chunk_digests(self, tokens: Buffer, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None) -> bytes:
        base = self.done if parent else 0
        here = {index - base: extra for index, extra in (extras or {}).items()}
        digests = super().chunk_digests(tokens, chunk_tokens, parent=parent, extras=here)
        self.done = base + len(digests) // DIGEST_BYTES
        return digests


class RootOfTheProcess(Right):
    root = hash("right").to_bytes(DIGEST_BYTES, "little", signed=True)


class KeepsTheLast(Right):
    last: tuple[Any, ...] = (None,)

    def chunk_digests(self, tokens: Any, chunk_tokens: int, *, parent: bytes = b"", extras: Extras = None) -> bytes:
        if self.last[0] is not tokens or self.last[1:-1] != (chunk_tokens, parent, extras):
            digests = super().chunk_digests(tokens, chunk_tokens, parent=parent, extras=extras)
            self.last = (tokens, chunk_tokens, parent, extras, digests)
        return self.last[-1]  # type: ignore[no-any-return]


class PythonsHash(Right):
    def one(self, parent: bytes, extra: bytes, chunk: bytes) -> bytes:
        return super().one(hash((parent, chunk)).to_bytes(8, "little", signed=True), extra, chunk)


class SaltOfTheProcess(Right):
    salt = os.urandom(8)

    def one(self, parent: bytes, extra: bytes, chunk: bytes) -> bytes:
        return super().one(parent + self.salt, extra, chunk)


class FingerprintOfTheProcess(Right):
    fingerprint = f"right/{os.getpid()}"


class CountedFingerprint(Right):
    made = itertools.count()

    def __init__(self) -> None:
        self.fingerprint = f"right/{next(self.made)}"


def by_view(memory: Any) -> object:
    """Memory by its address and length."""
    return (id(memory.obj) if isinstance(memory, memoryview) else id(memory), len(memory))


KEPT: list[memoryview] = []

CHANGED = "test_a_changed_token_changes_its_chunk_and_all_behind_it"
ORDER = "test_the_order_of_tokens_and_chunks_counts"
PARENT = "test_the_parent_counts"
BEHIND = "test_what_is_behind_the_last_whole_chunk_does_not_count"
WHOLE = "test_there_is_one_digest_for_each_whole_chunk"
BITS = "test_every_bit_of_a_digest_counts"
EXTRA = "test_an_extra_changes_its_chunk_and_all_behind_it"
MAPPING = "test_the_order_and_the_type_of_the_mapping_do_not_count"
MEMORY = "test_any_memory_of_the_tokens_gives_the_same"
KEPT_MEMORY = "test_memory_is_not_kept"
OTHERS = "test_a_call_knows_nothing_of_others"
NAMES = "test_it_has_the_plugins_name_and_a_fingerprint"
GOES_ON = "test_a_request_of_many_chunks_goes_on_anywhere"
SHARE = "share a digest"

# fmt: off
BUGS: dict[str, tuple[type[KeyHasher], str, str]] = {
    # tokens
    "no prefix": (one(lambda right, p, e, c: right(b"", e, c)), f"{CHANGED}[small-1]", "it 0 of token 0"),
    "first tokens only": (one(lambda right, p, e, c: right(p, e, c[:64])), f"{CHANGED}[large-256]", "of token 16 "),
    "last tokens only": (one(lambda right, p, e, c: right(p, e, c[-512:])), f"{CHANGED}[large-256]", "of token 0 "),
    "every 4th token": (one(lambda right, p, e, c: right(p, e, c[::16])), f"{CHANGED}[large-16]", "token 0 "),
    "not the first token": (one(lambda right, p, e, c: right(p, e, c[4:])), f"{CHANGED}[small-3]", "of token 0 "),
    "not the last token": (one(lambda right, p, e, c: right(p, e, c[:-4])), f"{CHANGED}[large-256]", "of token 255 "),
    "not the last byte": (one(lambda right, p, e, c: right(p, e, c[:-1])), f"{CHANGED}[small-3]", "it 24 of token 2 "),
    "1023 tokens of a chunk": (one(lambda right, p, e, c: right(p, e, c[:4092])), f"{CHANGED}[large-1024]", "of token 1023 "),
    "16 KiB of a chunk but its middle": (one(lambda right, p, e, c: right(p, e, c[:8192] + c[8224:])), f"{CHANGED}[large-4096]", "of token 2048 "),
    "tokens of 16 bits": (one(lambda right, p, e, c: right(p, e, b"".join(c[at : at + 2] for at in range(0, len(c), 4)))), f"{CHANGED}[large-16]", "it 16 of token 0 "),
    "tokens of 31 bits": (one(lambda right, p, e, c: right(p, e, str([each & 0x7FFFFFFF for each in words(c)]).encode())), f"{CHANGED}[small-3]", "it 31 of token 0 "),
    "tokens as floats": (one(lambda right, p, e, c: right(p, e, str([float(f"{each:.6e}") for each in words(c)]).encode())), f"{CHANGED}[large-1]", "it 0 of token 0 "),
    "tokens as text without commas": (one(lambda right, p, e, c: right(p, e, "".join(map(str, words(c))).encode())), f"{ORDER}[16]", SHARE),
    "a sum of tokens": (one(lambda right, p, e, c: right(p, e, b"%d" % sum(words(c)))), f"{ORDER}[16]", SHARE),
    "an exclusive or": (one(lambda right, p, e, c: right(p, e, str([a ^ b for a, b in zip(words(c)[::2], words(c)[1::2])]).encode())), f"{ORDER}[256]", SHARE),
    "tokens sorted": (one(lambda right, p, e, c: right(p, e, str(sorted(words(c))).encode())), f"{ORDER}[3]", SHARE),
    "a set of tokens": (one(lambda right, p, e, c: right(p, e, str({*words(c)}).encode())), f"{ORDER}[256]", SHARE),
    "a chain that begins again": (call(lambda right, t, c, p, e: far(right, t, c, p, e, 256)), f"{GOES_ON}[16]", "calls must equal one call"),
    "chunks side by side": (call(lambda right, t, c, p, e: b"".join(right(bytes(memoryview(t).cast("B"))[at * c * 4 : (at + 1) * c * 4], c, p, {0: (e or {}).get(at, b"")}) for at in range(memoryview(t).nbytes // (c * 4)))), f"{CHANGED}[large-16]", "must change the digest of chunk 1"),
    "the rest too": (call(lambda right, t, c, p, e: right(bytes(t) + bytes(-memoryview(t).nbytes % (c * 4)), c, p, e)), f"{WHOLE}[3]", "1 tokens in chunks of 3 gave"),
    "no last chunk": (call(lambda right, t, c, p, e: right(t, c, p, e)[:-DIGEST_BYTES]), f"{WHOLE}[256]", "256 tokens in chunks of 256 gave 0 bytes"),
    "the rest in the last chunk": (call(lambda right, t, c, p, e: right(t, c, p, {0: bytes(t)[len(bytes(t)) // (c * 4) * c * 4 :]})), f"{BEHIND}[256]", "after the last whole chunk must not count"),
    "at most 128 chunks": (call(lambda right, t, c, p, e: right(bytes(t)[: 128 * c * 4], c, p, e)), f"{GOES_ON}[16]", "from byte 4096 of"),
    # digests
    "8 bytes": (one(lambda right, p, e, c: right(p, e, c)[:8].ljust(32, b"\0")), f"{BITS}[256]", "64 of the 256 bits"),
    "16 bytes twice": (one(lambda right, p, e, c: right(p, e, c)[:16] * 2), f"{BITS}[1]", "128 of the 256 bits"),
    "a checksum eight times": (one(lambda right, p, e, c: b"".join(binascii.crc32(p + c, n).to_bytes(4, "big") for n in range(8))), f"{BITS}[256]", "of the 256 bits of a digest are independent"),
    "a constant byte": (one(lambda right, p, e, c: b"\1" + right(p, e, c)[1:]), f"{BITS}[1]", "248 of the 256 bits"),
    "hexadecimal": (one(lambda right, p, e, c: right(p, e, c)[:16].hex().encode()), f"{BITS}[1]", "of the 256 bits"),
    "a bytearray": (call(lambda right, t, c, p, e: bytearray(right(t, c, p, e))), f"{WHOLE}[16]", "returned bytearray, not bytes"),
    "a sum, not a hash": (one(lambda right, p, e, c: (int.from_bytes(p, "big") + int.from_bytes(c, "big")).to_bytes(2048, "big")[-32:]), f"{CHANGED}[small-1]", "use a cryptographic hash"),
    # parents
    "no parent of a call": (call(lambda right, t, c, p, e: right(t, c, b"", e)), f"{PARENT}[256]", "no parent and the parent"),
    "half a parent": (one(lambda right, p, e, c: right(p[:16], e, c)), f"{PARENT}[4]", "the parent without bit 0"),
    "a parent that ends at a zero": (one(lambda right, p, e, c: right(p.partition(b"\0")[0].ljust(32, b"\0"), e, c)), f"{PARENT}[4]", "no parent and the parent"),
    "a parent of 31 bytes": (one(lambda right, p, e, c: right(p[1:], e, c)), f"{PARENT}[256]", "without bit 248"),
    "a parent as a number of 63 bits": (one(lambda right, p, e, c: right(str(int.from_bytes(p[-8:], "big") >> 1).encode().rjust(32), e, c)), f"{PARENT}[256]", "without bit 0"),
    "another chain behind a parent": (call(lambda right, t, c, p, e: right(t, c, p and hashlib.sha256(p).digest(), e)), f"{GOES_ON}[16]", "from byte 32 of"),
    # extras
    "no extras": (one(lambda right, p, e, c: right(p, b"", c)), f"{EXTRA}[256]", "An extra of 1 bytes"),
    "32 bytes of an extra": (one(lambda right, p, e, c: right(p, e[:32], c)), f"{EXTRA}[4]", "32 bytes"),
    "4 KiB of an extra": (one(lambda right, p, e, c: right(p, e[:4096], c)), f"{EXTRA}[256]", "5120 bytes"),
    "an extra without its zeros": (one(lambda right, p, e, c: right(p, e.rstrip(b"\0"), c)), f"{EXTRA}[4]", "extra"),
    "the length of an extra": (one(lambda right, p, e, c: right(p, b"%d" % len(e), c)), f"{EXTRA}[4]", "share"),
    "an extra for a parent": (one(lambda right, p, e, c: right(p, e, c), root=b""), "test_an_extra_is_not_taken_for_a_parent", "as a parent"),
    "all extras at the first chunk": (call(lambda right, t, c, p, e: right(t, c, p, {0: b"".join((e or {}).values())})), f"{EXTRA}[4]", "must not change the digest of the earlier chunk 0"),
    "an extra one chunk late": (call(lambda right, t, c, p, e: right(t, c, p, {at + 1: each for at, each in (e or {}).items()})), f"{EXTRA}[256]", "must change the digest of chunk 0"),
    "extras of the first 256 chunks": (call(lambda right, t, c, p, e: right(t, c, p, {at: each for at, each in (e or {}).items() if at < 256})), f"{GOES_ON}[16]", "calls must equal one call"),
    "one extra of all": (call(lambda right, t, c, p, e: right(t, c, p, dict(list((e or {}).items())[:1]))), f"{GOES_ON}[16]", "calls must equal one call"),
    "extras not beside a parent": (call(lambda right, t, c, p, e: right(t, c, p, None if p else e)), f"{GOES_ON}[16]", "calls must equal one call"),
    "extras in the order given": (call(lambda right, t, c, p, e: right(t, c, p, dict(zip(sorted(e or {}), (e or {}).values(), strict=True)))), MAPPING, "The order of the extras in the mapping must not change"),
    "takes the extras away": (call(lambda right, t, c, p, e: right(t, c, p, {at: e.pop(at) for at in [*e]} if type(e) is dict else e)), MAPPING, "changed the caller's extras"),
    "extras by the request's index": (ExtrasByTheRequestsIndex, f"{GOES_ON}[16]", "calls must equal one call"),
    "an extra behind the tokens counts": (call(lambda right, t, c, p, e: right(t, c, p, {0: str(e).encode()} if e else None)), f"{BEHIND}[3]", "count"),
    # calls
    "words taken for bytes": (call(lambda right, t, c, p, e: right(bytes(memoryview(t).cast("B"))[: len(t)], c, p, e)), f"{MEMORY}[words]", "from byte 32 of 160"),
    "signed words": (call(lambda right, t, c, p, e: right(str(memoryview(t).tolist()).encode() if t else b"", c, p, e)), f"{MEMORY}[words]", "must hash as bytes"),
    "the whole object of a view": (call(lambda right, t, c, p, e: right(t.obj if isinstance(t, memoryview) else t, c, p, e)), f"{MEMORY}[odd place]", "must hash as bytes"),
    "keeps the tokens": (call(lambda right, t, c, p, e: KEPT.append(memoryview(t)) or right(t, c, p, e)), KEPT_MEMORY, "keeps a view of the tokens"),
    "remembers by length": (remembered(lambda t, c, p, e: (len(t), c, p, e)), OTHERS, "A used hasher"),
    "remembers by the first tokens": (remembered(lambda t, c, p, e: (bytes(t[:64]), len(t), c, p, e)), OTHERS, "A used hasher"),
    "remembers without extras": (remembered(lambda t, c, p, e: (bytes(t), c, p)), OTHERS, "A used hasher"),
    "remembers without the parent": (remembered(lambda t, c, p, e: (bytes(t), c, e)), OTHERS, "A used hasher"),
    "remembers without the chunk": (remembered(lambda t, c, p, e: (bytes(t), p, e)), OTHERS, "A used hasher"),
    "remembers memory by its place": (remembered(lambda t, c, p, e: (id(t.obj) if isinstance(t, memoryview) else bytes(t), len(t), c, p, e)), OTHERS, "A used hasher"),
    "keeps the last tokens": (KeepsTheLast, KEPT_MEMORY, "a reference to the tokens"),
    "remembers the last tokens": (KeepsTheLast, KEPT_MEMORY, "a reference to the tokens"),
    "remembers memory by its address": (remembered(lambda t, c, p, e: (by_view(t), c, p, e)), OTHERS, "A used hasher"),
    "cuts a parent": (call(lambda right, t, c, p, e: right(t, c, p and p[:32].ljust(32, b"\0"), e)), "test_no_digest_as_a_parent_and_no_tokens_in_a_chunk_are_refused[33-16]", "A parent of 33 bytes with chunks of 16 tokens was accepted"),
    "any parent": (type("Bug", (Right,), {"refuse": lambda self, parent, chunk: None}), "test_no_digest_as_a_parent_and_no_tokens_in_a_chunk_are_refused[5-16]", "A parent of 5 bytes with chunks of 16 tokens was accepted"),
    "divides by no tokens": (type("Bug", (Right,), {"refuse": lambda self, parent, chunk: None}), "test_no_digest_as_a_parent_and_no_tokens_in_a_chunk_are_refused[32-0]", "raised ZeroDivisionError, expected RequestError"),
    "chunks below zero": (call(lambda right, t, c, p, e: right(t, c, p, e) if c >= 0 else b""), "test_no_digest_as_a_parent_and_no_tokens_in_a_chunk_are_refused[0--1]", "chunks of -1 tokens was accepted"),
    "keeps the digest for an instant": (type("Bug", (Right,), {"one": lambda self, *each: setattr(self, "kept", Right.one(self, *each)) or self.kept}), "test_a_call_is_not_disturbed_at_any_step", "changed each other's digests"),
    "keeps the parent in itself": (KeepsTheParentInItself, "test_a_call_is_not_disturbed_at_any_step", "changed each other's digests"),
    # names
    "another fingerprint each time": (CountedFingerprint, NAMES, "must have the same fingerprint"),
    "no fingerprint": (type("Bug", (Right,), {"fingerprint": ""}), NAMES, "`fingerprint` is empty"),
    "a fingerprint of bytes": (type("Bug", (Right,), {"fingerprint": b"right"}), NAMES, "`fingerprint` must be a str"),
    "no name": (type("Bug", (Right,), {"name": ""}), NAMES, "is empty"),
    "python's hash": (PythonsHash, "test_another_process_finds_the_same[1]", "second process computes other digests"),
    "a root of the process": (RootOfTheProcess, "test_another_process_finds_the_same[1]", "computes other digests"),
    "a salt of the process": (SaltOfTheProcess, "test_another_process_finds_the_same[2]", "computes other digests"),
    "a fingerprint of the process": (FingerprintOfTheProcess, "test_another_process_finds_the_same[1]", "has another fingerprint"),
}
# fmt: on


@pytest.mark.parametrize("bug", BUGS)
def test_the_kit_finds(bug: str) -> None:
    made, test, says = BUGS[bug]
    must_fail(HasherConformance(), test, lambda: {"make_hasher": made, "hasher": made()}, says)
