"""Where segments are, and what they are called: by content alone, apart from prompts, salts and other rotations."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_blend.errors import BadSegments
from kvf_blend.messages import MAX_SEGMENTS
from kvf_blend.server.digests import final_digests, prompt_digests, segment_digests
from kvf_blend.server.segments import marked, split
from kvf_hashers.sha256 import Sha256
from kvframework.api.keys import DIGEST_BYTES
from tests.blend.blend_client import packed, pairs

CHUNK = 4
FINGERPRINT = bytes(range(16))
TOKENS = st.lists(st.integers(0, 3), max_size=40)


def plain_split(tokens: list[int], separator: list[int]) -> list[tuple[int, int]]:
    found, start, at = [], 0, 0
    while at <= len(tokens) - len(separator):
        if tokens[at : at + len(separator)] == separator:
            found.append((start, at))
            start = at = at + len(separator)
        else:
            at += 1
    found.append((start, len(tokens)))
    return [(begin, end) for begin, end in found if begin < end]


@given(TOKENS, st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_segments_lie_between_separators(tokens: list[int], separator: list[int]) -> None:
    if len(separator) <= len(tokens):
        assert split(packed(tokens), packed(separator)) == plain_split(tokens, separator)


@pytest.mark.parametrize(
    ("tokens", "separator", "expected"),
    [
        ([0x01020304, 0x05060708], [0x07080102], [(0, 2)]),  # its bytes occur, but across two tokens
        ([7, 7, 7, 1, 7, 7], [7, 7], [(2, 4)]),  # left to right, without overlap
        ([7, 7], [7], []),
        ([1, 2], [1, 2], []),
        ([1, 2], [3], [(0, 2)]),
    ],
)
def test_a_separator_is_whole_tokens(tokens: list[int], separator: list[int], expected: list[tuple[int, int]]) -> None:
    assert split(packed(tokens), packed(separator)) == expected


@dataclass(frozen=True)
class Bad:
    name: str
    ranges: bytes = b""
    separator: bytes = b""
    tokens: bytes = packed(range(10))
    says: str = ""


@pytest.mark.parametrize(
    "bad",
    [
        Bad("empty", pairs((3, 3)), says="is empty"),
        Bad("backwards", pairs((5, 3)), says="is empty"),
        Bad("unordered", pairs((5, 7), (1, 3)), says=", the end of the segment before it"),
        Bad("overlapping", pairs((1, 5), (4, 7)), says=", the end of the segment before it"),
        Bad("outside", pairs((1, 11)), says="after the end of"),
        Bad("of an empty prompt", pairs((0, 1)), tokens=b"", says="after the end of"),
        Bad("half a pair", pairs((1, 5))[:4], says="4 bytes"),
        Bad("half a token", tokens=b"12345", says="5 bytes"),
        Bad("half a separator", separator=b"123", says="3 bytes"),
        Bad("a long separator", separator=packed(range(11)), says="11 tokens, the prompt 10"),
        Bad("both", pairs((1, 2)), packed([1]), says="a separator and ranges"),
        Bad("too many", separator=packed([1]), tokens=packed([0, 1] * (MAX_SEGMENTS + 1)), says="4097 segments"),
    ],
    ids=lambda bad: bad.name,
)
def test_what_marks_no_segments_is_refused(bad: Bad) -> None:
    with pytest.raises(BadSegments, match=bad.says):
        marked(bad.tokens, bad.separator, bad.ranges)


def named(tokens: list[int], fingerprint: bytes = FINGERPRINT) -> bytes:
    return segment_digests(Sha256(), packed(tokens), CHUNK, fingerprint)


@given(TOKENS.filter(bool), TOKENS.filter(bool))
def test_one_name_is_one_content(left: list[int], right: list[int]) -> None:
    assert len(named(left)) == -(-len(left) // CHUNK) * DIGEST_BYTES
    assert (named(left)[-DIGEST_BYTES:] == named(right)[-DIGEST_BYTES:]) == (left == right)


@given(TOKENS.filter(bool))
def test_names_are_apart(tokens: list[int]) -> None:
    """From prompts, from blended prompts and from those of another rotation, chunk by chunk."""
    kinds = [
        named(tokens),
        named(tokens, bytes(16)),
        prompt_digests(Sha256(), packed(tokens), CHUNK),
        final_digests(Sha256(), packed(tokens), CHUNK, FINGERPRINT),
        final_digests(Sha256(), packed(tokens), CHUNK, bytes(16)),
    ]
    digests = [kind[at : at + DIGEST_BYTES] for kind in kinds for at in range(0, len(kind), DIGEST_BYTES)]
    assert len(set(digests)) == len(digests)


def test_padding_is_no_token() -> None:
    assert named([1, 2, 3]) != named([1, 2, 3, 0xFFFFFFFF])
    assert named([1, 2, 3]) != named([1, 2, 3, 0xFFFFFFFF, 0xFFFFFFFF])[:DIGEST_BYTES]


def test_names_stay_what_they_are() -> None:
    """What is in L2 is found by them after an update."""
    assert named([1, 2, 3, 4, 5]).hex()[:16] == "fd0f40c971eed26b"
    assert final_digests(Sha256(), packed([1, 2, 3, 4]), CHUNK, FINGERPRINT).hex()[:16] == "9027a32cc9fb8ca7"
