"""The body of `POST /score`, read in steps. Pure.

To decode a million tokens at once takes 50 ms, in which nothing else is answered, and 40 MB. A first pass, 6 times as
quick, only finds where the list is; its parts are decoded one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Annotated, TypeVar

import msgspec

from kvf_route import prefix_hashes
from kvf_route.events import MOST_BLOCK_TOKENS
from kvf_route.router import Router
from kvf_route.scoring import Scoring
from kvframework.api.hasher import DIGEST_BYTES

MOST_TOKENS = 1 << 20
MOST_DIGESTS = MOST_TOKENS // 16
# Of a list's text, decoded in one step: about half a millisecond.
_PART = 1 << 15
_COMMA = re.compile(b",")
_PLACE = re.compile(r"`\$\[(\d+)\]`")

Text = Annotated[str, msgspec.Meta(max_length=1024)]
Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
V = TypeVar("V")

_ABSENT = msgspec.Raw(b"null")
_tokens = msgspec.json.Decoder(list[Token]).decode
_digests = msgspec.json.Decoder(list[str]).decode


class ScoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /score`: `tokens`, or hexadecimal `digests` of kvframework's chunks of `chunk_tokens` tokens.
    `adapter` is the LoRA's name. Without a model, blocks of every model count."""

    tokens: msgspec.Raw = _ABSENT
    digests: msgspec.Raw = _ABSENT
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_BLOCK_TOKENS)] = 256
    model: Text | None = None
    salt: Text = ""
    adapter: Text = ""


_asked = msgspec.json.Decoder(ScoreRequest).decode


def scoring_of(body: bytearray, router: Router) -> Scoring:
    """The score that a body asks for, in steps of some milliseconds. A step raises `msgspec.MsgspecError`,
    `ValueError`, `OverflowError` or `RecursionError` for a body that is no request."""
    asked = _asked(body)
    yield None
    if _is_given(asked.tokens) == _is_given(asked.digests):
        raise ValueError("a request needs tokens or digests, not both")
    packed = bytearray()
    if _is_given(asked.tokens):
        for tokens in _parts("tokens", asked.tokens, _tokens, MOST_TOKENS):
            packed += prefix_hashes.packed(tokens)
            yield None
        yield from router.score_tokens(bytes(packed), asked.model, asked.salt, asked.adapter)
        return
    if asked.model is None:
        raise ValueError("a request with digests needs `model`")
    for digests in _parts("digests", asked.digests, _digests, MOST_DIGESTS):
        named = [bytes.fromhex(each) for each in digests]
        if any(len(each) != DIGEST_BYTES for each in named):
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes, {2 * DIGEST_BYTES} digits")
        packed += b"".join(named)
        yield None
    yield from router.score_digests(bytes(packed), asked.chunk_tokens, asked.model, asked.salt, asked.adapter)


def _is_given(value: msgspec.Raw) -> bool:
    return bytes(memoryview(value)[:5]) != b"null"


def _parts(field: str, value: msgspec.Raw, decode: Callable[[bytes], list[V]], most: int) -> Iterator[list[V]]:
    """The values of a flat array, part by part. What is cut at a comma within a string, or within a list, is no
    array: no such cut goes unnoticed."""
    text, count = memoryview(value), 0
    if bytes(text[:1]) != b"[":
        text = memoryview(b"[]")
        _decoded(field, 0, decode, bytes(value))
    at, last = 1, len(text) - 1
    while at <= last:
        comma = _COMMA.search(text, at + _PART, last)
        end = comma.start() if comma else last
        values = _decoded(field, count, decode, b"".join((b"[", text[at:end], b"]")))
        at, count = end + 1, count + len(values)
        if count > most:
            raise ValueError(f"Expected `array` of length <= {most} - at `$.{field}`")
        yield values


def _decoded(field: str, begin: int, decode: Callable[[bytes], list[V]], text: bytes) -> list[V]:
    try:
        return decode(text)
    except msgspec.ValidationError as error:
        at = _PLACE.search(str(error))
        where = f"$.{field}[{begin + int(at[1])}]" if at else f"$.{field}"
        raise ValueError(f"{_PLACE.sub('', str(error)).removesuffix(' - at ')} - at `{where}`") from None
