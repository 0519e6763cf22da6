"""The hasher kit's tests of service: the caller's memory, other calls, other threads, other processes."""

from __future__ import annotations

import gc
import random
import weakref
from functools import partial
from typing import Any

import pytest

from kvf_dev.testing.hasher.kit import HasherKit, MakeHasher, mixed, must_equal, packed
from kvf_dev.testing.kit import interleaved, must_refuse
from kvframework.api.hasher import DIGEST_BYTES, Buffer, KeyHasher
from kvframework.errors import RequestError

_CHUNK = 16
_ELSEWHERE = """
import sys
tokens = b"".join((number * 2654435761 % 2**32).to_bytes(4, "little") for number in range(64))
for parent in (b"", bytes(range(32))):
    sys.stdout.buffer.write(made.chunk_digests(tokens, 4, parent=parent))
    sys.stdout.buffer.write(made.chunk_digests(tokens, 4, parent=parent, extras={1: b"image", 5: b"adapter"}))
sys.stdout.buffer.write(made.fingerprint.encode())
"""


class _Tokens(bytearray):
    """Memory that a weak reference can point to."""


class ServingTests(HasherKit):
    """One hasher serves many callers."""

    @pytest.mark.parametrize(
        "form", ["bytes", "bytearray", "memoryview", "read-only", "words", "signed", "bytes of 'c'", "odd place"]
    )
    def test_any_memory_of_the_tokens_gives_the_same(self, hasher: KeyHasher, form: str) -> None:
        tokens = packed(mixed(5 * _CHUNK + 2))
        odd = memoryview(bytearray(b"\xff" + tokens + b"\xff"))[1:-1]
        forms: dict[str, Buffer] = {
            "bytes": tokens,
            "bytearray": bytearray(tokens),
            "memoryview": memoryview(bytearray(tokens)),
            "read-only": memoryview(tokens),
            "words": memoryview(tokens).cast("I"),
            "signed": memoryview(tokens).cast("h"),
            "bytes of 'c'": memoryview(tokens).cast("c"),  # type: ignore[dict-item]
            "odd place": odd,
        }
        found = hasher.chunk_digests(forms[form], _CHUNK)
        must_equal(found, hasher.chunk_digests(tokens, _CHUNK), f"tokens as {form} give other digests than as bytes")
        assert bytes(forms[form]) == tokens, "tokens are the caller's, and the call changed them"

    def test_memory_is_not_kept(self, hasher: KeyHasher) -> None:
        """Neither a view of the tokens nor a reference: they are the caller's memory."""
        for count in (_CHUNK - 1, 10 * _CHUNK, 1000 * _CHUNK):
            for more in ({}, {"parent": bytes(range(DIGEST_BYTES))}, {"extras": {0: b"a"}}):
                tokens = _Tokens(packed(range(count)))
                hasher.chunk_digests(tokens, _CHUNK, **more)
                gc.collect()
                try:
                    tokens.append(0)
                except BufferError:
                    pytest.fail("a view of the tokens is kept after the call")
                left = weakref.ref(tokens)
                del tokens
                gc.collect()
                assert left() is None, "a reference to the tokens is kept after the call"

    @pytest.mark.parametrize("form", ["bytearray", "memoryview", "read-only", "words"])
    def test_tokens_may_be_written_over_after_the_call(self, make_hasher: MakeHasher, form: str) -> None:
        """One buffer, and one view of it, serve one request after the other; a call of the same arguments looks at
        their content."""
        hasher, memory = make_hasher(), bytearray(4 * 5 * _CHUNK)
        view = memoryview(memory)
        forms = {"bytearray": memory, "memoryview": view, "read-only": view.toreadonly(), "words": view.cast("I")}
        for more in ({}, {"parent": bytes(range(DIGEST_BYTES))}, {"extras": {1: b"a"}}):
            for at in (0, 2 * _CHUNK, 5 * _CHUNK - 1, 0):
                memory[4 * at] ^= 1
                found = hasher.chunk_digests(forms[form], _CHUNK, **more)  # type: ignore[arg-type]
                fresh = make_hasher().chunk_digests(bytes(memory), _CHUNK, **more)
                must_equal(found, fresh, f"token {at} was written over in the same {form}: not what a new hasher gives")

    @pytest.mark.parametrize("nbytes", [1, 5, 31, 33, 40, 64])
    def test_a_parent_that_is_no_digest_is_refused(self, hasher: KeyHasher, nbytes: int) -> None:
        for tokens in (packed(range(2 * _CHUNK)), b""):
            call = partial(hasher.chunk_digests, tokens, _CHUNK, parent=bytes(range(nbytes)))
            must_refuse(f"a parent of {nbytes} bytes", call, RequestError)

    @pytest.mark.parametrize("chunk", [0, -1])
    def test_a_chunk_without_tokens_is_refused(self, hasher: KeyHasher, chunk: int) -> None:
        call = partial(hasher.chunk_digests, packed(range(2 * _CHUNK)), chunk)
        must_refuse(f"a call with chunks of {chunk} tokens", call, RequestError)

    def test_a_call_knows_nothing_of_others(self, make_hasher: MakeHasher) -> None:
        """Calls that differ in one argument each, in any order and in the same memory of the tokens, give what a new
        hasher gives."""
        tokens, last = mixed(5 * _CHUNK), mixed(5 * _CHUNK)
        last[-1] ^= 1
        calls: list[tuple[bytes, int, dict[str, Any]]] = [
            (packed(ids), chunk, {"parent": parent, "extras": extras})
            for ids in (tokens, last, tokens[::-1], tokens[:_CHUNK], mixed(6 * _CHUNK)[_CHUNK:])
            for chunk in (_CHUNK, _CHUNK - 1)
            for parent in (b"", bytes(range(DIGEST_BYTES)))
            for extras in (None, {0: b"a"}, {0: b"b"}, {4: b"a"})
        ]
        alone = [make_hasher().chunk_digests(ids, chunk, **more) for ids, chunk, more in calls]
        hasher, memory = make_hasher(), bytearray(5 * _CHUNK * 4)
        order = [*range(len(calls))] * 2
        random.Random(1).shuffle(order)  # noqa: S311  fixed order
        for index in order:
            ids, chunk, more = calls[index]
            memory[: len(ids)] = ids
            with memoryview(memory) as view, view[: len(ids)] as place:
                found = hasher.chunk_digests(place, chunk, **more)
            must_equal(found, alone[index], "a call gives other digests after other calls than with a new hasher")

    def test_an_engine_without_the_options_finds_the_same_or_is_refused(self, make_hasher: MakeHasher) -> None:
        """Engines make the hasher by its name alone. What depends on options belongs into the fingerprint."""
        if not (self.use and self.options):
            pytest.skip("there are no options")
        server, engine = make_hasher(), self.by_name({})()
        tokens = packed(mixed(64))
        if server.chunk_digests(tokens, _CHUNK) != engine.chunk_digests(tokens, _CHUNK):
            assert server.fingerprint != engine.fingerprint, "options change the digests and not the fingerprint"

    @pytest.mark.parametrize("seed", [1, 2])
    def test_another_process_finds_the_same(self, hasher: KeyHasher, seed: int) -> None:
        """The result does not depend on `PYTHONHASHSEED`: an engine finds the objects that others stored by these
        digests.
        """
        tokens = packed(number * 2654435761 % 2**32 for number in range(64))
        here = b"".join(
            hasher.chunk_digests(tokens, 4, parent=parent, extras=extras)
            for parent in (b"", bytes(range(32)))
            for extras in (None, {5: b"adapter", 1: b"image"})
        )
        there = self.elsewhere(hasher, _ELSEWHERE, seed=seed)
        must_equal(there[: len(here)], here, "another process finds other digests")
        assert there[len(here) :].decode() == hasher.fingerprint, "another process has another fingerprint"

    def test_a_call_is_not_disturbed_at_any_step(self, hasher: KeyHasher) -> None:
        """Before each instruction of a call another thread makes another: no time is too short to be in the way."""
        tokens, others = (packed(mixed((2 + seed) * _CHUNK)[seed:]) for seed in range(2))
        alone = hasher.chunk_digests(tokens, _CHUNK)
        found = interleaved(lambda: hasher.chunk_digests(tokens, _CHUNK), lambda: hasher.chunk_digests(others, _CHUNK))
        must_equal(found, alone, "threads disturb each other")
