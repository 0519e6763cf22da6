"""The hasher kit's tests of hashing in pieces: engines hash tokens as they come, each token once."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvf_dev.testing.hasher.kit import HasherKit, mixed, must_equal, packed
from kvframework.api.hasher import DIGEST_BYTES, KeyHasher

_TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
_CHUNKS = st.integers(1, 9)
_EXTRAS = st.dictionaries(st.integers(0, 12), st.binary(min_size=1, max_size=40), max_size=4)


class PieceTests(HasherKit):
    """Prefixes, and going on from a parent."""

    def test_the_digests_of_a_prefix_are_a_prefix(self, hasher: KeyHasher) -> None:
        @settings(max_examples=self.examples, deadline=None)
        @given(tokens=_TOKENS, chunk=_CHUNKS, extras=_EXTRAS, kept=st.integers(0, 40))
        def check(tokens: list[int], chunk: int, extras: dict[int, bytes], kept: int) -> None:
            whole = hasher.chunk_digests(packed(tokens), chunk, extras=extras)
            found = hasher.chunk_digests(packed(tokens[:kept]), chunk, extras=extras)
            must_equal(found, whole[: len(found)], "the digests of a prefix are no prefix of the digests")

        check()

    def test_going_on_from_a_parent_equals_one_call(self, hasher: KeyHasher) -> None:
        @settings(max_examples=self.examples, deadline=None)
        @given(tokens=_TOKENS, chunk=_CHUNKS, extras=_EXTRAS, split=st.integers(0, 40))
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
