"""The hasher kit's tests of digests themselves: their number, their form, and how many of their bits count."""

from __future__ import annotations

import pytest

from kvf_dev.testing.hasher.kit import CHUNKS, HasherKit, MakeHasher, mixed, packed, split
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
