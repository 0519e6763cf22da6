"""Where segments are, and what they are called: by content alone, apart from prompts, salts and other rotations. Which
known segments are found in a prompt, and which of them are taken: the same as by comparing all with all."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_blend.errors import BadSegments
from kvf_blend.messages import MAX_SEGMENTS, Segment
from kvf_blend.server import matcher
from kvf_blend.server.matcher import KnownSegments, Space
from kvf_blend.server.segments import (
    Choice,
    Question,
    final_digests,
    marked,
    prompt_digests,
    segment_digests,
    split,
    unpack,
)
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


SPACE: Space = (b"namespace", b"salt", b"fingerprint")
FEW = st.integers(0, 2)
SEGMENT = st.lists(FEW, min_size=1, max_size=24)
PROMPT = st.lists(st.one_of(SEGMENT, FEW.map(lambda token: [token])), max_size=8).map(
    lambda parts: list(chain.from_iterable(parts))
)


def name(tokens: bytes) -> bytes:
    return segment_digests(Sha256(), tokens, CHUNK, b"f" * 16)


def index(known: Sequence[Sequence[int]], most: int = 1000) -> KnownSegments:
    segments = KnownSegments(most)
    for each in known:
        segments.add(SPACE, packed(each), name(packed(each)))
    return segments


def everywhere(prompt: Sequence[int], known: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(start, length) of every occurrence, the longest first, then the leftmost."""
    places = {
        (start, len(each))
        for each in known
        for start in range(len(prompt) - len(each) + 1)
        if list(prompt[start : start + len(each)]) == list(each)
    }
    return sorted(places, key=lambda place: (-place[1], place[0]))


def found(segments: KnownSegments, prompt: Sequence[int]) -> list[tuple[int, int]]:
    return [(each.start, each.tokens) for each in segments.find(SPACE, packed(prompt), name)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """A prompt in which known segments do occur, also within each other."""
    known = draw(st.lists(SEGMENT, max_size=6))
    prompt = draw(PROMPT)
    for each in known[:3]:
        at = draw(st.integers(0, len(prompt)))
        prompt[at:at] = each
    return prompt, known


@given(cases())
def test_all_occurrences_are_found(case: tuple[list[int], list[list[int]]]) -> None:
    prompt, known = case
    assert found(index(known), prompt) == everywhere(prompt, known)


@given(cases(), st.integers(0, 10), st.data())
def test_the_longest_are_taken_first(case: tuple[list[int], list[list[int]]], chunks: int, data: st.DataObject) -> None:
    """Of what is there, behind the prefix, without overlap."""
    prompt, known = case
    there = {tuple(each) for each in known if data.draw(st.booleans())}
    chains = [[bytes([kind, number]) for number in range(chunks)] for kind in (1, 2)]
    lengths = [data.draw(st.integers(0, chunks)) for _ in chains]
    have = {digest for each in there for digest in unpack(name(packed(each)))}
    have |= {digest for row, length in zip(chains, lengths, strict=True) for digest in row[:length]}
    question = Question(
        chains[0], chains[1], index(known).find(SPACE, packed(prompt), name), chunk_tokens=CHUNK, most_digests=10_000
    )
    choice = question.choose(have)

    assert (list(choice.prefix), choice.exact) == (
        (chains[0][: lengths[0]], True) if lengths[0] >= lengths[1] else (chains[1][: lengths[1]], False)
    )
    free = [start >= max(lengths) * CHUNK for start in range(len(prompt))]
    expected = []
    for start, length in everywhere(prompt, [each for each in known if whole(each, have)]):
        if all(free[start : start + length]):
            free[start : start + length] = [False] * length
            expected.append((start, length))
    assert [(each.start, each.tokens) for each in choice.segments] == sorted(expected)
    assert set(choice.digests()) <= have


def whole(segment: Sequence[int], have: set[bytes]) -> bool:
    return have.issuperset(unpack(name(packed(segment))))


@given(cases())
def test_equal_hashes_are_not_enough(case: tuple[list[int], list[list[int]]]) -> None:
    """Should all rolling hashes collide, nothing wrong is found."""
    prompt, known = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matcher, "_BASE", 0)
        patch.setattr(matcher, "_rolling", lambda tokens: [0] * (len(tokens) // 4 + 1))
        places = found(index(known), prompt)
    assert set(places) <= set(everywhere(prompt, known))


def test_spaces_never_meet() -> None:
    segments = index([[1, 2, 3, 4]])
    for part in range(3):
        other: Space = (*SPACE[:part], b"other", *SPACE[part + 1 :])  # type: ignore[assignment]
        assert segments.find(other, packed([1, 2, 3, 4]), name) == []
    assert found(segments, [1, 2, 3, 4]) == [(0, 4)]


def test_what_was_not_met_for_longest_is_forgotten() -> None:
    a, b, c, d = ([number] * 20 for number in range(1, 5))
    segments = index([a, b, c], most=3)
    assert found(segments, a) == [(0, 20)]
    segments.add(SPACE, packed(d), name(packed(d)))
    segments.add(SPACE, packed(d), name(packed(d)))
    assert len(segments) == 3
    assert found(segments, a + b + c + d) == [(0, 20), (40, 20), (60, 20)]
    for number in range(100):
        segments.add(SPACE, packed([number, 7]), name(packed([number, 7])))
    assert found(segments, a + b + c + d) == []
    assert len(segments) == 3
    assert found(index([a], most=0), a) == []


def test_the_index_empties_itself() -> None:
    """Forgetting leaves no empty tables behind: salts come and go."""
    segments = KnownSegments(1)
    for number in range(50):
        space: Space = (b"n", bytes([number]), b"f")
        segments.add(space, packed([number] * (number + 1)), name(packed([number] * (number + 1))))
    assert len(segments._spaces) == 1


REPEATED = [[7] * (1000 + number) for number in range(300)]
DOCUMENT = [(number * 31) % 1009 for number in range(500)]


def test_one_token_over_and_over_costs_a_bounded_number_of_comparisons() -> None:
    """300 known segments at 20,000 places are 6 million comparisons. The document behind them is still found."""
    segments, tokens = index([*REPEATED, DOCUMENT]), packed([7] * 20_000 + DOCUMENT)
    work = [(list(range(20_000)), [known for known in segments._known.values() if known.tokens >= 1000])]
    assert len(list(matcher._equal(tokens, work))) <= matcher.MAX_COMPARISONS
    places = segments.find(SPACE, tokens, name)
    assert 1 < len(places) <= matcher.MAX_MATCHES
    assert (20_000, 500) in [(each.start, each.tokens) for each in places]


def test_a_bounded_number_of_tokens_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(tokens: bytes) -> bytes:
        hashed.append(len(tokens) // 4)
        return name(tokens)

    monkeypatch.setattr(matcher, "MAX_VERIFIED_TOKENS", 1 << 14)
    assert index(REPEATED).find(SPACE, packed([7] * 1299), counting)
    assert 1 << 13 < sum(hashed) <= 1 << 14


def test_documents_with_one_beginning_are_told_apart() -> None:
    """A corpus may begin all its documents alike."""
    head = list(range(16))
    known = [[*head, *(number * 7 + at for at in range(20 + number % 50))] for number in range(500)]
    prompt = [*known[3], 5, *known[250], *known[499]]
    assert sorted(found(index(known), prompt)) == sorted(everywhere(prompt, [known[3], known[250], known[499]]))


def test_a_question_keeps_to_its_bound() -> None:
    """The longest candidates stay in it."""
    candidates = [Segment(at * 100, at, bytes([at]) * 32) for at in range(1, CHUNK + 1)]
    question = Question([b"a"], [b"b"], candidates, chunk_tokens=CHUNK, most_digests=2 + 2)
    assert question.digests == [b"a", b"b", bytes([4]) * 32, bytes([3]) * 32]
    assert [each.tokens for each in question.choose(set(question.digests)).segments] == [3, 4]
    assert question.choose(set()) == Choice()


def test_many_threads_use_it() -> None:
    segments = KnownSegments(50)
    documents = [[number] * 5 + list(range(number, number + 30)) for number in range(100)]
    failures: list[object] = []

    def use(offset: int) -> None:
        try:
            for turn in range(60):
                each = documents[(offset * 17 + turn) % 100]
                segments.add(SPACE, packed(each), name(packed(each)))
                prompt = [9, *each, *documents[turn]]
                failures.extend(set(found(segments, prompt)) - set(everywhere(prompt, documents)))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert len(segments) == 50
