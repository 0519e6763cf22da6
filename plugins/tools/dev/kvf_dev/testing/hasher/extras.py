"""The hasher kit's tests of extras: bytes that a chunk's content depends on besides tokens."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from kvf_dev.testing.hasher.kit import HasherKit, mixed, must_change, must_differ, must_equal, packed
from kvframework.api.hasher import DIGEST_BYTES, KeyHasher

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
