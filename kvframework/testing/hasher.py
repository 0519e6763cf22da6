"""The conformance kit for key hashers: tests that every `KeyHasher` must pass. Runs under pytest.

Name the plugin; the kit finds, checks and creates it as a server does:

    from kvframework.testing import HasherConformance

    class TestMyHasher(HasherConformance):
        use = "myhasher"                # the entry point `hasher.myhasher`

or give a fixture that returns a factory, which makes a new hasher at each call:

    class TestMyHasher(HasherConformance):
        @pytest.fixture
        def make_hasher(self):
            return MyHasher

Digests are names: two prefixes that differ must not share a digest. A test of fixed digests, beside the kit,
shows that they stay as they are from release to release. Needs pytest and hypothesis.
"""

from __future__ import annotations

import array
import gc
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, Buffer, HasherProvider, KeyHasher
from kvframework.testing.making import NamedKit

MakeHasher = Callable[[], KeyHasher]

_CHUNK = 4
_U32_MAX = 2**32 - 1

_TOKENS = st.lists(st.integers(0, _U32_MAX), max_size=40)
_CHUNKS = st.integers(1, 9)
_EXTRAS = st.dictionaries(st.integers(0, 12), st.binary(min_size=1, max_size=40), max_size=4)

_ELSEWHERE = """
import sys
tokens = b"".join((number * 2654435761 % 2**32).to_bytes(4, "little") for number in range(64))
digests = made.chunk_digests(tokens, 4, parent=bytes(range(32)), extras={1: b"image", 5: b"adapter"})
sys.stdout.buffer.write(digests + made.fingerprint.encode())
"""


class HasherConformance(NamedKit):
    """Base class of an author's test class; see the module."""

    _descriptor = HasherProvider

    examples: ClassVar[int] = 100
    """How many generated requests each property is tested on."""

    @pytest.fixture
    def make_hasher(self) -> MakeHasher:
        """Return a factory of hashers; an engine and the server each make their own."""
        return self.by_name()

    @pytest.fixture
    def hasher(self, make_hasher: MakeHasher) -> KeyHasher:
        return make_hasher()

    def test_it_has_the_plugins_name_and_a_fingerprint(self, make_hasher: MakeHasher) -> None:
        one, other = make_hasher(), make_hasher()
        self.must_be_named(one.name)
        assert isinstance(one.fingerprint, str)
        assert one.fingerprint
        assert one.fingerprint == other.fingerprint, "engines and the server compare it"

    # the form of an answer

    @pytest.mark.parametrize("chunk", [1, 3, 4, 256])
    def test_there_is_one_digest_for_each_whole_chunk(self, hasher: KeyHasher, chunk: int) -> None:
        for count in (0, 1, chunk - 1, chunk, chunk + 1, 3 * chunk - 1, 3 * chunk):
            digests = hasher.chunk_digests(_packed(range(count)), chunk)
            assert type(digests) is bytes
            assert len(digests) == count // chunk * DIGEST_BYTES, f"{count} tokens in chunks of {chunk}"

    def test_every_bit_of_a_digest_counts(self, hasher: KeyHasher) -> None:
        """No bit of a digest is constant or a copy of another bit: fewer effective bits would mean collisions."""
        digests = _split(hasher.chunk_digests(_packed(range(200)), 1))
        numbers = [int.from_bytes(digest, "big") for digest in digests]
        columns = [tuple(number >> bit & 1 for number in numbers) for bit in range(8 * DIGEST_BYTES)]
        assert all(len(set(column)) == 2 for column in columns), "a bit never changes"
        assert len({min(column, tuple(1 - bit for bit in column)) for column in columns}) == len(columns), (
            "a copied bit"
        )

    def test_no_two_chunks_of_a_request_are_the_same(self, hasher: KeyHasher) -> None:
        """The chunks of a request have different digests, even where all tokens are equal."""
        for token in (0, 7, _U32_MAX):
            digests = _split(hasher.chunk_digests(_packed([token] * 400), _CHUNK))
            assert len(set(digests)) == 100

    # what it depends on

    def test_a_changed_token_changes_its_chunk_and_all_behind_it(self, hasher: KeyHasher) -> None:
        """The test flips every bit of every token."""
        tokens = [1000 * number for number in range(3 * _CHUNK)]
        before = _split(hasher.chunk_digests(_packed(tokens), _CHUNK))
        last = {before[-1]}
        for at, bit in itertools.product(range(len(tokens)), range(32)):
            changed = [*tokens[:at], tokens[at] ^ 1 << bit, *tokens[at + 1 :]]
            after = _split(hasher.chunk_digests(_packed(changed), _CHUNK))
            same = [one == other for one, other in zip(before, after, strict=True)]
            assert same == [index < at // _CHUNK for index in range(3)], f"bit {bit} of token {at}"
            last.add(after[-1])
        assert len(last) == 1 + 32 * len(tokens), "two requests have one digest"

    def test_the_order_of_tokens_and_chunks_counts(self, hasher: KeyHasher) -> None:
        orders = [_packed(order) for order in itertools.permutations([5, 6, 7, 8])]
        assert len({hasher.chunk_digests(order, _CHUNK) for order in orders}) == len(orders)
        chunks = [_packed([number] * _CHUNK) for number in range(4)]
        ends = [hasher.chunk_digests(b"".join(each), _CHUNK)[-DIGEST_BYTES:] for each in itertools.permutations(chunks)]
        assert len(set(ends)) == len(ends)

    def test_the_parent_counts(self, hasher: KeyHasher) -> None:
        tokens = _packed(range(_CHUNK))
        parents = [b"", *_split(hasher.chunk_digests(_packed(range(40)), _CHUNK))]
        parents += [bytes(index == at for index in range(DIGEST_BYTES)) for at in range(DIGEST_BYTES)]
        found = [hasher.chunk_digests(tokens, _CHUNK, parent=parent) for parent in parents]
        assert len(set(found)) == len(parents)

    def test_an_extra_changes_its_chunk_and_all_behind_it(self, hasher: KeyHasher) -> None:
        tokens = _packed([9] * 3 * _CHUNK)
        plain = _split(hasher.chunk_digests(tokens, _CHUNK))
        last = {plain[-1]}
        extras = [b"\0", b"\1", b"\0\0", b"a", b"ab", b"b", bytes(32), bytes(33), b"x" * 5000, _packed([9])]
        for at, extra in itertools.product(range(3), extras):
            found = _split(hasher.chunk_digests(tokens, _CHUNK, extras={at: extra}))
            assert [one == other for one, other in zip(plain, found, strict=True)] == [index < at for index in range(3)]
            last.add(found[-1])
        assert len(last) == 1 + 3 * len(extras), "two requests have one digest"

    def test_an_extra_is_not_taken_for_a_parent(self, hasher: KeyHasher) -> None:
        """The digest of an image is as long as a parent digest."""
        tokens, digest = _packed(range(_CHUNK)), bytes(range(DIGEST_BYTES))
        for rest in (b"", b"adapter"):
            with_parent = hasher.chunk_digests(tokens, _CHUNK, parent=digest, extras={0: rest} if rest else None)
            assert with_parent != hasher.chunk_digests(tokens, _CHUNK, extras={0: digest + rest})

    def test_what_is_behind_the_last_whole_chunk_does_not_count(self, hasher: KeyHasher) -> None:
        tokens = _packed(range(2 * _CHUNK))
        whole = hasher.chunk_digests(tokens, _CHUNK)
        for more in (b"x", _packed([1]), _packed(range(_CHUNK))[:-1]):
            assert hasher.chunk_digests(tokens + more, _CHUNK, extras={2: b"later", 7: b"much later"}) == whole

    # hashing in pieces

    def test_the_digests_of_a_prefix_are_a_prefix(self, hasher: KeyHasher) -> None:
        @settings(max_examples=self.examples, deadline=None)
        @given(tokens=_TOKENS, chunk=_CHUNKS, extras=_EXTRAS, kept=st.integers(0, 40))
        def check(tokens: list[int], chunk: int, extras: dict[int, bytes], kept: int) -> None:
            whole = hasher.chunk_digests(_packed(tokens), chunk, extras=extras)
            assert whole.startswith(hasher.chunk_digests(_packed(tokens[:kept]), chunk, extras=extras))

        check()

    def test_going_on_from_a_parent_equals_one_call(self, hasher: KeyHasher) -> None:
        @settings(max_examples=self.examples, deadline=None)
        @given(tokens=_TOKENS, chunk=_CHUNKS, extras=_EXTRAS, split=st.integers(0, 40))
        @example(tokens=[*range(13)], chunk=2, extras={1: b"image", 3: b"adapter"}, split=2)
        def check(tokens: list[int], chunk: int, extras: dict[int, bytes], split: int) -> None:
            split = min(split, len(tokens) // chunk)
            head = hasher.chunk_digests(_packed(tokens[: split * chunk]), chunk, extras=extras)
            rest = {index - split: extra for index, extra in extras.items() if index >= split}
            parent = head[-DIGEST_BYTES:]
            tail = hasher.chunk_digests(_packed(tokens[split * chunk :]), chunk, parent=parent, extras=rest)
            assert head + tail == hasher.chunk_digests(_packed(tokens), chunk, extras=extras)

        check()

    def test_no_extras_in_every_form_are_the_same(self, hasher: KeyHasher) -> None:
        tokens = _packed(range(3 * _CHUNK))
        plain = hasher.chunk_digests(tokens, _CHUNK)
        assert hasher.chunk_digests(tokens, _CHUNK, parent=b"", extras=None) == plain
        assert hasher.chunk_digests(tokens, _CHUNK, extras={}) == plain

    # the caller's memory

    @pytest.mark.parametrize("form", ["bytes", "bytearray", "memoryview", "read-only", "words", "odd place"])
    def test_any_memory_of_the_tokens_gives_the_same(self, hasher: KeyHasher, form: str) -> None:
        tokens = _packed(range(1, 5 * _CHUNK + 2))
        odd = memoryview(bytearray(b"\xff" + tokens + b"\xff"))[1:-1]
        forms: dict[str, Buffer] = {
            "bytes": tokens,
            "bytearray": bytearray(tokens),
            "memoryview": memoryview(bytearray(tokens)),
            "read-only": memoryview(tokens),
            "words": memoryview(tokens).cast("I"),
            "odd place": odd,
        }
        assert hasher.chunk_digests(forms[form], _CHUNK) == hasher.chunk_digests(tokens, _CHUNK)
        assert bytes(forms[form]) == tokens, "tokens are the caller's"

    def test_memory_is_not_kept(self, hasher: KeyHasher) -> None:
        for count in (_CHUNK - 1, 10 * _CHUNK, 1000 * _CHUNK):
            tokens = bytearray(_packed(range(count)))
            hasher.chunk_digests(tokens, _CHUNK)
            gc.collect()
            tokens.clear()  # raises BufferError if a view of it is left

    # everywhere the same

    def test_a_call_knows_nothing_of_others(self, make_hasher: MakeHasher) -> None:
        requests = [_packed(range(first, first + 5 * _CHUNK)) for first in (0, 3, 1000)]
        alone = [make_hasher().chunk_digests(tokens, _CHUNK, extras={0: tokens[:5]}) for tokens in requests]
        hasher = make_hasher()
        for index in (0, 1, 2, 2, 0, 1):
            hasher.chunk_digests(requests[index - 1], _CHUNK - 1)
            found = hasher.chunk_digests(requests[index], _CHUNK, extras={0: requests[index][:5]})
            assert found == alone[index]

    @pytest.mark.parametrize("seed", [1, 2])
    def test_another_process_finds_the_same(self, hasher: KeyHasher, seed: int) -> None:
        """The result does not depend on `PYTHONHASHSEED`: an engine finds the objects that others stored by these
        digests.
        """
        tokens = _packed([number * 2654435761 % 2**32 for number in range(64)])
        parent, extras = bytes(range(32)), {5: b"adapter", 1: b"image"}
        here = hasher.chunk_digests(tokens, _CHUNK, parent=parent, extras=extras)
        assert self.elsewhere(hasher, _ELSEWHERE, seed=seed) == here + hasher.fingerprint.encode()

    def test_threads_do_not_disturb_each_other(self, hasher: KeyHasher) -> None:
        """The server and the engine each hash in several threads."""
        chance = random.Random(1)  # noqa: S311  fixed content
        requests = [_packed([chance.randrange(2**32) for _ in range(2000)]) for _ in range(4)]
        alone = [hasher.chunk_digests(tokens, 50) for tokens in requests]

        def work(index: int) -> None:
            for _ in range(30):
                assert hasher.chunk_digests(requests[index], 50) == alone[index]

        self.in_threads(*(lambda index=index: work(index) for index in range(4)))


def _packed(tokens: Sequence[int]) -> bytes:
    """Pack tokens as engines send them: little-endian u32."""
    packed = array.array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    assert packed.itemsize == TOKEN_BYTES
    return packed.tobytes()


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
