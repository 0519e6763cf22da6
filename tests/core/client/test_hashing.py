"""The digests of a request are those of its tokens and extras, however they come: as a list or any sequence, in pieces,
or in bytes; extras with the tokens that end their chunk, or before."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_hashers.sha256 import Sha256
from kvframework.client import RequestHashes
from kvframework.errors import BadRange, RequestError

CHUNK = 4
FORMS: dict[str, Callable[[list[int]], Sequence[int]]] = {
    "list": list,
    "tuple": tuple,
    "array": lambda tokens: array.array("q", tokens),
}


def hashes() -> RequestHashes:
    return RequestHashes(Sha256(), CHUNK, request_id="r")


@given(st.lists(st.tuples(st.sampled_from(sorted(FORMS)), st.lists(st.integers(0, (1 << 32) - 1), max_size=9))))
def test_tokens_of_every_form_in_pieces(pieces: list[tuple[str, list[int]]]) -> None:
    request, tokens = hashes(), [token for _, piece in pieces for token in piece]
    for form, piece in pieces:
        request.extend(FORMS[form](piece))
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert request.hashed_tokens == len(tokens) // CHUNK * CHUNK
    assert request.digests(request.hashed_tokens) == Sha256().chunk_digests(packed, CHUNK)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [-1, 1 << 32])
def test_what_is_no_u32_is_refused(form: str, wrong: int) -> None:
    with pytest.raises(OverflowError):
        hashes().extend(FORMS[form]([1, wrong]))


@given(
    st.lists(st.lists(st.integers(0, (1 << 32) - 1), max_size=9), min_size=1, max_size=6),
    st.dictionaries(st.integers(0, 7), st.tuples(st.binary(max_size=3), st.integers(0, 5)), max_size=4),
)
def test_extras_count_whenever_they_come(pieces: list[list[int]], extras: dict[int, tuple[bytes, int]]) -> None:
    """Each extra comes some calls, or none, before the one that ends its chunk."""
    request, ends = hashes(), [sum(map(len, pieces[: call + 1])) // CHUNK for call in range(len(pieces))]
    coming: list[dict[int, bytes]] = [{} for _ in pieces]
    for index, (extra, sooner) in extras.items():
        ending = next((call for call, chunks in enumerate(ends) if chunks > index), len(pieces) - 1)
        coming[max(ending - sooner, 0)][index] = extra
    for piece, here in zip(pieces, coming, strict=True):
        request.extend(piece, here)
    packed = b"".join(token.to_bytes(4, "little") for piece in pieces for token in piece)
    told = {index: extra for index, (extra, _) in extras.items()}
    assert request.digests(request.hashed_tokens) == Sha256().chunk_digests(packed, CHUNK, extras=told)


@pytest.mark.parametrize("early", [[], [1], [1, 2, 3]])
def test_an_extra_before_its_chunk_is_whole_counts(early: list[int]) -> None:
    tokens = [1, 2, 3, 4]
    request, image, other = hashes(), hashes(), hashes()
    request.extend(early, {0: b"image A"})
    request.extend(tokens[len(early) :])
    image.extend(tokens, {0: b"image A"})
    other.extend(tokens, {0: b"image B"})
    assert request.digests(CHUNK) == image.digests(CHUNK) != other.digests(CHUNK)


def test_an_extra_after_its_chunk_is_hashed_is_refused() -> None:
    request = hashes()
    request.extend([1, 2, 3, 4, 5])
    with pytest.raises(RequestError, match="chunk 0, which is already hashed without it"):
        request.extend([6, 7, 8], {0: b"image A", 1: b"image B"})
    request.extend([6, 7, 8], {1: b"image B"})
    assert request.digests(8) == Sha256().chunk_digests(
        b"".join(token.to_bytes(4, "little") for token in range(1, 9)), CHUNK, extras={1: b"image B"}
    )


def test_extras_may_be_given_again_but_not_changed() -> None:
    request = hashes()
    for token in range(9):
        request.extend([token], {0: b"adapter", 1: b"image", 2: b"image"})
    for index in range(3):
        with pytest.raises(RequestError, match=f"chunk {index} has two different extras"):
            request.extend([], {index: b"another"})


def test_extras_of_chunks_that_another_process_has_hashed_are_in_their_digests() -> None:
    first = hashes()
    first.extend([1, 2, 3, 4], {0: b"image"})
    request = RequestHashes(Sha256(), CHUNK, request_id="r", digests=first.digests(CHUNK))
    for each in (first, request):
        each.extend([5, 6, 7, 8], {0: b"image", 1: b"adapter"})
    assert request.digests(8) == first.digests(8)


def test_an_extra_of_no_chunk_is_refused() -> None:
    with pytest.raises(RequestError, match="chunk -1"):
        hashes().extend([1], {-1: b"image"})


def test_a_failure_of_the_hasher_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    request, whole = hashes(), hashes()
    request.extend([1, 2])
    with monkeypatch.context() as patched:
        patched.setattr(Sha256, "chunk_digests", lambda *_args, **_more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            request.extend([3, 4], {0: b"image A"})
    request.extend([3, 4], {0: b"image B"})
    whole.extend([1, 2, 3, 4], {0: b"image B"})
    assert request.digests(CHUNK) == whole.digests(CHUNK)


@pytest.mark.parametrize("end", [-CHUNK, 1, 2 * CHUNK])
def test_an_end_that_is_none_has_an_error_of_the_frameworks_own(end: int) -> None:
    request = hashes()
    request.extend(list(range(CHUNK)))
    with pytest.raises(BadRange, match=f"a multiple of {CHUNK}, at most the {CHUNK} tokens"):
        request.digests(end)
