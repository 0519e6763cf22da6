"""The digests of a request are those of its tokens and extras, however they come: as a list or any sequence, in pieces,
or in bytes; extras with the tokens that end their chunk, or before. Packed token ids: the token kernel gives the
integers and the errors of `array.fromlist`."""

from __future__ import annotations

import array
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_hashers.sha256 import Sha256
from kvframework.client import RequestHashes, hashing
from kvframework.client.hashing import packed_behind
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


KERNEL = hashing._kernel()
kernel = pytest.mark.skipif(KERNEL is None, reason="the token kernel was not built, or not for this interpreter")

MANY = 2 * hashing._FEW
# Long enough for the kernel, around what is special: small integers that Python keeps, and the first of two digits.
IDS = st.sampled_from([0, 1, 256, 257, 128_000, (1 << 30) - 1, 1 << 30, (1 << 32) - 1]) | st.integers(0, (1 << 32) - 1)


class Token(IntEnum):
    FIRST = 7


class Indexed:
    def __index__(self) -> int:
        return 7


def by_array(rest: array.array[int], ids: Sequence[int]) -> array.array[int]:
    return rest + array.array("I", ids)


@given(st.lists(st.integers(0, 99), max_size=3), st.lists(IDS, max_size=20), st.booleans())
def test_ids_of_any_size(rest: list[int], ids: list[int], many: bool) -> None:
    before = array.array("I", rest)
    ids = ids * (MANY if many else 1)
    assert packed_behind(before, ids) == by_array(before, ids)
    assert before.tolist() == rest


@pytest.mark.parametrize("wrong", [-1, 1 << 32, 1 << 64, -(1 << 90), 1.0, "7", None, Indexed()])
@pytest.mark.parametrize("at", [0, MANY // 2, MANY - 1])
def test_what_is_no_token_has_the_errors_of_an_array(wrong: object, at: int) -> None:
    ids: list[object] = [128_000] * MANY
    ids[at] = wrong
    found, expected = outcome(packed_behind, ids), outcome(by_array, ids)
    assert found == expected
    assert (found[0] is array.array) is isinstance(wrong, Indexed)


def outcome(pack: object, ids: list[object]) -> tuple[type, str]:
    try:
        packed = pack(array.array("I"), ids)  # type: ignore[operator]
    except (OverflowError, TypeError) as error:
        return type(error), str(error)
    return type(packed), packed.tolist()


@pytest.mark.parametrize("odd", [True, False, Token.FIRST])
def test_subclasses_of_integers_are_tokens(odd: int) -> None:
    ids = [*range(MANY), odd]
    assert packed_behind(array.array("I"), ids).tolist() == [*range(MANY), int(odd)]


def test_a_subclass_of_list_is_packed() -> None:
    class Tokens(list[int]):
        pass

    assert packed_behind(array.array("I"), Tokens(range(MANY))).tolist() == list(range(MANY))


@kernel
def test_the_kernel_packs_plain_integers_up_to_the_first_that_is_none() -> None:
    assert KERNEL is not None
    room = array.array("I", [9]) * 4
    assert KERNEL([0, 5, (1 << 30) - 1, 1000, 6], room) == 4
    assert room.tolist() == [0, 5, (1 << 30) - 1, 1000]
    for odd in (-1, 1 << 30, True):
        assert KERNEL([3, odd, 3], room) == 1


def test_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_kernel", lambda: None)
    assert packed_behind(array.array("I", [1]), list(range(MANY))).tolist() == [1, *range(MANY)]


def test_an_interpreter_that_is_not_known_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    assert hashing._kernel.__wrapped__() is None
