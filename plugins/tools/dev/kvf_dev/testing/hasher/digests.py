"""The hasher kit's tests of digests: their number and form, how many of their bits count, the extras that a chunk's
content depends on besides tokens, and hashing in pieces: engines hash tokens as they come, each token once."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvf_dev.testing.hasher.kit import (
    CHUNKS,
    HasherKit,
    MakeHasher,
    mixed,
    must_change,
    must_differ,
    must_equal,
    packed,
    split,
)
from kvframework.api.hasher import DIGEST_BYTES, KeyHasher

_BITS = 8 * DIGEST_BYTES
_MANY = 2 * _BITS


class DigestTests(HasherKit):
    """The form of an answer."""

    def test_it_has_the_plugins_name_and_a_fingerprint(self, make_hasher: MakeHasher) -> None:
        one, other = make_hasher(), make_hasher()
        self.must_be_named(one.name)
        assert isinstance(one.fingerprint, str), f"`fingerprint` is a str, not {one.fingerprint!r}"
        assert one.fingerprint, "`fingerprint` is empty"
        one.chunk_digests(packed(range(64)), 16)
        assert one.fingerprint == other.fingerprint, "engines and the server compare fingerprints, and two differ"

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_there_is_one_digest_for_each_whole_chunk(self, hasher: KeyHasher, chunk: int) -> None:
        for count in (0, 1, chunk - 1, chunk, chunk + 1, 3 * chunk - 1, 3 * chunk, 40 * chunk + chunk // 2):
            for parent in (b"", bytes(range(DIGEST_BYTES))):
                digests = hasher.chunk_digests(packed(range(count)), chunk, parent=parent)
                assert type(digests) is bytes, f"digests are `bytes`, not {type(digests).__name__}"
                assert len(digests) == count // chunk * DIGEST_BYTES, (
                    f"{count} tokens in chunks of {chunk}: {len(digests)} bytes instead of 32 for each whole chunk"
                )

    @pytest.mark.parametrize("chunk", [1, 256])
    def test_every_bit_of_a_digest_counts(self, hasher: KeyHasher, chunk: int) -> None:
        """No bit of a digest is constant or follows from other bits: fewer effective bits would mean collisions."""
        chunks = [packed([*mixed(chunk - 1), number]) for number in range(_MANY)]
        for how, digests in (
            ("first chunks", [hasher.chunk_digests(each, chunk) for each in chunks]),
            ("chunks of a request", split(hasher.chunk_digests(b"".join(chunks), chunk))),
        ):
            first, *others = (int.from_bytes(digest, "big") for digest in digests)
            found = _rank([number ^ first for number in others])
            assert found == _BITS, f"{how}: {found} of the {_BITS} bits of a digest count, others follow from them"

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_no_two_chunks_of_a_request_are_the_same(self, hasher: KeyHasher, chunk: int) -> None:
        """The chunks of a request have different digests, even where all tokens are equal."""
        for token in (0, 7, 2**32 - 1):
            digests = split(hasher.chunk_digests(packed([token] * (600 * chunk)), chunk))
            assert len(set(digests)) == 600, f"two chunks of one request share a digest (all tokens are {token})"


def _rank(rows: list[int]) -> int:
    """Return the number of independent rows of bits."""
    by_top: dict[int, int] = {}
    for row in rows:
        while row:
            top = row.bit_length()
            if top not in by_top:
                by_top[top] = row
                break
            row ^= by_top[top]
    return len(by_top)


# Digests of adapters and images, alone and several of one chunk, and long ones that differ at one place.
_LONG = bytes(range(256)) * 20
_EXTRAS = [b"\0", b"\1", b"\0\0", b"a", b"ab", b"b", bytes(31), bytes(32), bytes(33), bytes(64), bytes(65), _LONG]
_EXTRAS += [_LONG[:-1] + b"?", b"?" + _LONG[1:], _LONG[:2560] + b"?" + _LONG[2561:], _LONG + b"\0", packed([9])]


class ExtraTests(HasherKit):
    """Every byte of every extra, at its chunk."""

    @pytest.mark.parametrize("chunk", [4, 256])
    def test_an_extra_changes_its_chunk_and_all_behind_it(self, hasher: KeyHasher, chunk: int) -> None:
        tokens = packed([9] * (3 * chunk))
        plain = hasher.chunk_digests(tokens, chunk)
        named = [("no extra", plain)]
        for at in range(3):
            for number, extra in enumerate(_EXTRAS):
                found = hasher.chunk_digests(tokens, chunk, extras={at: extra})
                must_change(plain, found, at, f"an extra of {len(extra)} bytes")
                named.append((f"extra {number} ({len(extra)} bytes) at chunk {at}", found))
        must_differ(named, "extras differ in content, length or chunk")

    def test_an_extra_belongs_to_its_chunk(self, hasher: KeyHasher) -> None:
        """Extras that change places, or the border between them."""
        tokens = packed([9] * 12)
        cases = [{0: b"a", 1: b"b"}, {0: b"b", 1: b"a"}, {0: b"ab"}, {1: b"ab"}, {0: b"a", 2: b"b"}]
        cases += [{0: b"a"}, {1: b"a"}, {2: b"a"}, {0: b"a", 1: b"a"}, {0: b"a", 1: b"a", 2: b"a"}]
        must_differ([(case, hasher.chunk_digests(tokens, 4, extras=case)) for case in cases], "extras at other chunks")

    def test_extras_count_far_behind_the_start(self, hasher: KeyHasher) -> None:
        tokens = packed(mixed(700))
        plain = hasher.chunk_digests(tokens, 1)
        for at in (9, 10, 255, 256, 699):
            must_change(plain, hasher.chunk_digests(tokens, 1, extras={at: b"x"}), at, f"the extra at {at}")

    def test_an_extra_is_not_taken_for_a_parent(self, hasher: KeyHasher) -> None:
        """The digest of an image is as long as a parent digest."""
        tokens, digest = packed(range(4)), bytes(range(DIGEST_BYTES))
        for rest in (b"", b"adapter"):
            with_parent = hasher.chunk_digests(tokens, 4, parent=digest, extras={0: rest} if rest else None)
            for extra in (digest + rest, rest + digest):
                assert with_parent != hasher.chunk_digests(tokens, 4, extras={0: extra}), (
                    "an extra of the length of a digest is taken for a parent"
                )

    def test_extras_count_beside_a_parent(self, hasher: KeyHasher) -> None:
        tokens, parent = packed(mixed(12)), bytes(range(DIGEST_BYTES))
        plain = hasher.chunk_digests(tokens, 4, parent=parent)
        for at in range(3):
            found = hasher.chunk_digests(tokens, 4, parent=parent, extras={at: b"x"})
            must_change(plain, found, at, f"the extra at {at} of a call with a parent")

    def test_the_order_and_the_type_of_the_mapping_do_not_count(self, hasher: KeyHasher) -> None:
        tokens = packed(mixed(16))
        extras = {3: b"c", 0: b"a", 2: b"b", 9: b"behind"}
        expected = hasher.chunk_digests(tokens, 4, extras={0: b"a", 2: b"b", 3: b"c"})
        found = hasher.chunk_digests(tokens, 4, extras=extras)
        assert extras == {3: b"c", 0: b"a", 2: b"b", 9: b"behind"}, "the call changes the caller's extras"
        must_equal(found, expected, "the order in which extras are given counts")
        read_only = hasher.chunk_digests(tokens, 4, extras=MappingProxyType(extras))
        must_equal(read_only, expected, "extras in a read-only mapping give other digests than in a dict")

    def test_no_extras_in_every_form_are_the_same(self, hasher: KeyHasher) -> None:
        tokens = packed(range(12))
        plain = hasher.chunk_digests(tokens, 4)
        must_equal(hasher.chunk_digests(tokens, 4, parent=b"", extras=None), plain, "extras=None is not `no extras`")
        must_equal(hasher.chunk_digests(tokens, 4, extras={}), plain, "extras={} is not `no extras`")


_TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
_CHUNKS = st.integers(1, 9)
_SETS_OF_EXTRAS = st.dictionaries(st.integers(0, 12), st.binary(min_size=1, max_size=40), max_size=4)


class PieceTests(HasherKit):
    """Prefixes, and going on from a parent."""

    def test_the_digests_of_a_prefix_are_a_prefix(self, hasher: KeyHasher) -> None:
        @settings(max_examples=self.examples, deadline=None)
        @given(tokens=_TOKENS, chunk=_CHUNKS, extras=_SETS_OF_EXTRAS, kept=st.integers(0, 40))
        def check(tokens: list[int], chunk: int, extras: dict[int, bytes], kept: int) -> None:
            whole = hasher.chunk_digests(packed(tokens), chunk, extras=extras)
            found = hasher.chunk_digests(packed(tokens[:kept]), chunk, extras=extras)
            must_equal(found, whole[: len(found)], "the digests of a prefix are no prefix of the digests")

        check()

    def test_going_on_from_a_parent_equals_one_call(self, hasher: KeyHasher) -> None:
        @settings(max_examples=self.examples, deadline=None)
        @given(tokens=_TOKENS, chunk=_CHUNKS, extras=_SETS_OF_EXTRAS, split=st.integers(0, 40))
        @example(tokens=[*range(13)], chunk=2, extras={1: b"image", 3: b"adapter"}, split=2)
        def check(tokens: list[int], chunk: int, extras: dict[int, bytes], split: int) -> None:
            split = min(split, len(tokens) // chunk)
            _must_go_on(hasher, tokens, chunk, extras, [split])

        check()

    @pytest.mark.parametrize("chunk", [1, 16, 256])
    def test_a_request_of_many_chunks_goes_on_anywhere(self, hasher: KeyHasher, chunk: int) -> None:
        """Piece by piece, as an engine does: the parent may be the digest of the hundredth chunk."""
        tokens, extras = mixed(300 * chunk + chunk // 2), {0: b"adapter", 99: b"image", 256: b"another"}
        for splits in ([1], [99], [100], [255], [256], [299], [300], [1, 2, 3], [100, 200, 257]):
            _must_go_on(hasher, tokens, chunk, extras, splits)

    def test_a_request_is_hashed_chunk_by_chunk(self, hasher: KeyHasher) -> None:
        _must_go_on(hasher, mixed(40 * 16), 16, {7: b"image"}, [*range(1, 40)])


def _must_go_on(hasher: KeyHasher, tokens: list[int], chunk: int, extras: dict[int, bytes], splits: list[int]) -> None:
    """Fail unless the digests of one call are those of calls for the chunks between `splits`."""
    found = b""
    for start, end in zip([0, *splits], [*splits, None], strict=True):
        piece = tokens[start * chunk : None if end is None else end * chunk]
        here = {index - start: extra for index, extra in extras.items() if index >= start}
        found += hasher.chunk_digests(packed(piece), chunk, parent=found[-DIGEST_BYTES:], extras=here)
    whole = hasher.chunk_digests(packed(tokens), chunk, extras=extras)
    must_equal(found, whole, f"going on from the parent behind chunks {splits} of {chunk} tokens differs from one call")
