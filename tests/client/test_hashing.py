"""The digests of a request are those of its tokens, however they come: as a list or any sequence, in pieces, or in
bytes."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvf_hashers.sha256 import Sha256
from kvframework.client import RequestHashes

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
