"""Tests of digests: their form, what they depend on, extras, and hashing in pieces."""

from __future__ import annotations

import itertools
from types import MappingProxyType

import pytest

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

    def test_an_extra_is_not_taken_for_a_parent(self, hasher: KeyHasher) -> None:
        """The digest of an image is as long as a parent digest."""
        tokens, digest = packed(range(4)), bytes(range(DIGEST_BYTES))
        for rest in (b"", b"adapter"):
            with_parent = hasher.chunk_digests(tokens, 4, parent=digest, extras={0: rest} if rest else None)
            for extra in (digest + rest, rest + digest):
                assert with_parent != hasher.chunk_digests(tokens, 4, extras={0: extra}), (
                    "an extra of the length of a digest is taken for a parent"
                )

    def test_the_order_and_the_type_of_the_mapping_do_not_count(self, hasher: KeyHasher) -> None:
        tokens = packed(mixed(16))
        extras = {3: b"c", 0: b"a", 2: b"b", 9: b"behind"}
        expected = hasher.chunk_digests(tokens, 4, extras={0: b"a", 2: b"b", 3: b"c"})
        found = hasher.chunk_digests(tokens, 4, extras=extras)
        assert extras == {3: b"c", 0: b"a", 2: b"b", 9: b"behind"}, "the call changes the caller's extras"
        must_equal(found, expected, "the order in which extras are given counts")
        read_only = hasher.chunk_digests(tokens, 4, extras=MappingProxyType(extras))
        must_equal(read_only, expected, "extras in a read-only mapping give other digests than in a dict")
        plain = hasher.chunk_digests(tokens, 4)
        must_equal(hasher.chunk_digests(tokens, 4, parent=b"", extras=None), plain, "extras=None is not `no extras`")
        must_equal(hasher.chunk_digests(tokens, 4, extras={}), plain, "extras={} is not `no extras`")


class PieceTests(HasherKit):
    """Prefixes, and going on from a parent."""

    @pytest.mark.parametrize("chunk", [1, 16, 256])
    def test_a_request_of_many_chunks_goes_on_anywhere(self, hasher: KeyHasher, chunk: int) -> None:
        """Piece by piece, as an engine does: the parent may be the digest of the hundredth chunk. The digests of a
        prefix are a prefix of the digests."""
        tokens, extras = mixed(300 * chunk + chunk // 2), {0: b"adapter", 99: b"image", 256: b"another"}
        for splits in ([1], [99], [100], [255], [256], [299], [300], [100, 200, 257], [*range(1, 40)]):
            _must_go_on(hasher, tokens, chunk, extras, splits)


def _must_go_on(hasher: KeyHasher, tokens: list[int], chunk: int, extras: dict[int, bytes], splits: list[int]) -> None:
    """Fail unless the digests of one call are those of calls for the chunks between `splits`."""
    found = b""
    for start, end in zip([0, *splits], [*splits, None], strict=True):
        piece = tokens[start * chunk : None if end is None else end * chunk]
        here = {index - start: extra for index, extra in extras.items() if index >= start}
        found += hasher.chunk_digests(packed(piece), chunk, parent=found[-DIGEST_BYTES:], extras=here)
    whole = hasher.chunk_digests(packed(tokens), chunk, extras=extras)
    must_equal(found, whole, f"going on from the parent behind chunks {splits} of {chunk} tokens differs from one call")


_CHANGED_BITS = 64  # of 256: half of them change on average, less than a quarter never of a cryptographic hash


class TokenTests(HasherKit):
    """Tokens, their order, and the prefix before them."""

    @pytest.mark.parametrize("chunk", CHUNKS)
    @pytest.mark.parametrize("ids", ["small", "large"])
    def test_a_changed_token_changes_its_chunk_and_all_behind_it(self, hasher: KeyHasher, chunk: int, ids: str) -> None:
        """Every token of three chunks is changed; every bit is, too: of all tokens of small chunks, and by turns of
        large ones."""
        tokens = mixed(3 * chunk) if ids == "large" else list(range(3 * chunk))
        before = hasher.chunk_digests(packed(tokens), chunk)
        for at in range(len(tokens)):
            for bit in range(32) if chunk < 16 else {at % 32, (at + 16) % 32}:
                changed = [*tokens]
                changed[at] ^= 1 << bit
                after = hasher.chunk_digests(packed(changed), chunk)
                must_change(before, after, at // chunk, f"bit {bit} of token {at} ({ids} ids, chunks of {chunk})")
                apart = int.from_bytes(before[-DIGEST_BYTES:], "big") ^ int.from_bytes(after[-DIGEST_BYTES:], "big")
                assert apart.bit_count() >= _CHANGED_BITS, (
                    f"bit {bit} of token {at} changes {apart.bit_count()} bits of a digest: no cryptographic hash"
                )

    @pytest.mark.parametrize("chunk", [1024, 4096])
    def test_every_token_of_a_long_chunk_counts(self, hasher: KeyHasher, chunk: int) -> None:
        """Chunks as long as some servers have them: each token of the first one, and the second one's ends."""
        step = chunk // 1024
        tokens = packed(mixed(2 * chunk))
        before = hasher.chunk_digests(tokens, chunk)
        for at in (*range(0, chunk, step), chunk - 2, chunk - 1, chunk, chunk + chunk // 2, 2 * chunk - 1):
            changed = bytearray(tokens)
            changed[4 * at + at % 4] ^= 1 << at % 8
            after = hasher.chunk_digests(bytes(changed), chunk)
            must_change(before, after, at // chunk, f"token {at} (chunks of {chunk})")

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_the_order_of_tokens_and_chunks_counts(self, hasher: KeyHasher, chunk: int) -> None:
        """Also of tokens whose ids read the same one after the other, in decimal or in hexadecimal."""
        count = 4 * chunk
        tokens = mixed(count)
        orders = {"as they are": tokens, "backwards": tokens[::-1], "turned by one": [*tokens[1:], tokens[0]]}
        for one, other in [*itertools.pairwise(range(count)), (0, count - 1), (0, chunk // 2), (0, count // 2)]:
            swapped = [*tokens]
            swapped[one], swapped[other] = swapped[other], swapped[one]
            orders.setdefault(f"tokens {one} and {other} swapped", swapped)
        chunks = [tokens[at : at + chunk] for at in range(0, count, chunk)]
        for order in itertools.permutations(range(4)):
            orders[f"chunks in the order {order}"] = [token for index in order for token in chunks[index]]
        for pair in ([1, 23], [12, 3], [123, 0], [1, 11], [11, 1], [0, 123], [1230, 0], [0x1, 0x1A], [0x11, 0xA]):
            orders[f"{pair} again and again"] = pair * (count // 2)
        unique = {tuple(order): name for name, order in orders.items()}
        digests = [(name, hasher.chunk_digests(packed(order), chunk)) for order, name in unique.items()]
        must_differ(digests, "the order counts")

    @pytest.mark.parametrize("chunk", [4, 256])
    def test_the_parent_counts(self, hasher: KeyHasher, chunk: int) -> None:
        """Every bit of a parent digest is flipped; all chunks of the call depend on it."""
        tokens = packed(mixed(3 * chunk))
        parent = b"\0" + hasher.chunk_digests(packed(range(chunk)), chunk)[1:]
        number = int.from_bytes(parent, "big")
        found = [
            ("no parent", hasher.chunk_digests(tokens, chunk)),
            ("the parent", hasher.chunk_digests(tokens, chunk, parent=parent)),
        ]
        for bit in range(8 * DIGEST_BYTES):
            other = (number ^ 1 << bit).to_bytes(DIGEST_BYTES, "big")
            found.append((f"the parent without bit {bit}", hasher.chunk_digests(tokens, chunk, parent=other)))
        for index in range(3):
            digests = [(name, each[: (index + 1) * DIGEST_BYTES]) for name, each in found]
            must_differ(digests, f"the parent counts in chunk {index}")

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_what_is_behind_the_last_whole_chunk_does_not_count(self, hasher: KeyHasher, chunk: int) -> None:
        tokens = packed(mixed(2 * chunk))
        whole = hasher.chunk_digests(tokens, chunk)
        rests = [packed(range(chunk - 1)), packed([1] * (chunk - 1)), packed([2**32 - 1] * (chunk // 2)), b"x", b"xyz"]
        for rest in rests:
            for extras in (None, {2: b"later", 7: b"much later"}):
                if len(rest) < 4 * chunk:
                    found = hasher.chunk_digests(tokens + rest, chunk, extras=extras)
                    must_equal(found, whole, f"{len(rest)} bytes behind the last whole chunk of {chunk} tokens count")
