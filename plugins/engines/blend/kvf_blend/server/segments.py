"""The positions of the segments of a prompt: between separators, or by ranges. Pure; runs in the server's worker
threads.

Tokens come and go packed, little-endian u32; positions count tokens.
"""

from __future__ import annotations

import struct

from kvf_blend.errors import BadSegments
from kvf_blend.messages import MAX_SEGMENTS
from kvframework.api.keys import TOKEN_BYTES

Span = tuple[int, int]


def marked(tokens: bytes, separator: bytes, ranges: bytes) -> list[Span]:
    """The marked segments, (start, end) in order, none empty; none at all without a separator and ranges.

    Raises `BadSegments` for a separator and ranges together, and for marks that do not fit these tokens.
    """
    for name, packed in (("tokens", tokens), ("separator", separator)):
        if len(packed) % TOKEN_BYTES:
            raise BadSegments(f"it has {len(packed)} bytes", where=name, available=f"{TOKEN_BYTES} bytes a token id")
    if separator and ranges:
        raise BadSegments("the request has a separator and ranges", available="a separator or ranges")
    spans = split(tokens, separator) if separator else unpack_ranges(ranges, len(tokens) // TOKEN_BYTES)
    if len(spans) > MAX_SEGMENTS:
        raise BadSegments(f"{len(spans)} segments are too many", where="separator", available=f"at most {MAX_SEGMENTS}")
    return spans


def split(tokens: bytes, separator: bytes) -> list[Span]:
    """The ranges between occurrences of `separator`, found left to right without overlap; nothing empty. Raises
    `BadSegments` if it is longer than the prompt."""
    if len(separator) > len(tokens):
        raise BadSegments(
            f"the separator has {len(separator) // TOKEN_BYTES} tokens, the prompt {len(tokens) // TOKEN_BYTES}",
            where="separator",
            hint="give the separator's own token ids, and the whole prompt",
        )
    spans, start = [], 0
    while (at := _find(tokens, separator, start)) >= 0:
        spans.append((start, at))
        start = at + len(separator)
    spans.append((start, len(tokens)))
    return [(begin // TOKEN_BYTES, end // TOKEN_BYTES) for begin, end in spans if begin < end]


def unpack_ranges(ranges: bytes, length: int) -> list[Span]:
    """The (start, end) pairs. Raises `BadSegments` unless they are ordered, apart, not empty and within `length`
    tokens."""
    if len(ranges) % (2 * TOKEN_BYTES):
        raise BadSegments(
            f"it has {len(ranges)} bytes", where="ranges", available="pairs of two packed u32, start and end"
        )
    spans = list(struct.iter_unpack("<2I", ranges))
    last = 0
    for index, (start, end) in enumerate(spans):
        where, found = f"ranges[{index}]", f"[{start}, {end})"
        if start >= end:
            raise BadSegments(f"{found} is empty", where=where, available="start < end")
        if start < last:
            raise BadSegments(
                f"{found} begins before token {last}, the end of the segment before it",
                where=where,
                available="ranges in order, without overlap",
            )
        if end > length:
            raise BadSegments(f"{found} ends after the end of the prompt", where=where, available=f"up to {length}")
        last = end
    return [(start, end) for start, end in spans]


def _find(tokens: bytes, separator: bytes, start: int) -> int:
    """The offset of the next whole occurrence, in bytes; matches that begin within a token id do not count."""
    at = tokens.find(separator, start)
    while at % TOKEN_BYTES and at >= 0:
        at = tokens.find(separator, at + 1)
    return at
