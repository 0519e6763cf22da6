"""The segments of a prompt: where they are, how they are named, and which of their hits are loaded. Pure; runs in the
server's worker and storage threads, the names in engine processes, too.

Segments are between separators, or given by ranges. Tokens come and go packed, little-endian u32; positions count
tokens.

A name is a digest of the server's hasher, kept apart from those of prompts. A segment's name covers its own tokens and
those that every segment of the instance is computed behind, neither its position nor the text before it. A change of
any byte that is hashed here needs a new number in the tag: objects under the old name are then no longer found.

Of the hits the prefix goes first: the longer of the exact one and the one of an earlier blend, the exact one if they
are equal. Of the segments behind it, and apart from each other, the longest is taken first, of equal ones the leftmost.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from kvf_blend.errors import BadSegments
from kvf_blend.messages import MAX_SEGMENTS, Segment
from kvframework.api.hasher import DIGEST_BYTES, KeyHasher
from kvframework.api.keys import TOKEN_BYTES

Span = tuple[int, int]


def marked(tokens: bytes, separator: bytes, ranges: bytes) -> list[Span]:
    """The marked segments, (start, end) in order, none empty; none at all without a separator and ranges.

    Raises `BadSegments` for a separator and ranges together, and for marks that do not fit these tokens.
    """
    for name, packed in (("tokens", tokens), ("separator", separator)):
        if len(packed) % TOKEN_BYTES:
            raise BadSegments(
                f"the field has {len(packed)} bytes", where=name, available=f"{TOKEN_BYTES} bytes a token id"
            )
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
            f"the ranges have {len(ranges)} bytes", where="ranges", available="pairs of two packed u32, start and end"
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


_SEGMENT = b"kvf-blend/segment/1"
_FINAL = b"kvf-blend/final/1"
_TAIL = b"tail"
# No vocabulary has this token id.
_PADDING = b"\xff\xff\xff\xff"


def chunks_of(tokens: int, chunk_tokens: int) -> int:
    """Chunks that a segment of `tokens` tokens fills, the last one perhaps in part."""
    return -(-tokens // chunk_tokens)


def segment_digests(hasher: KeyHasher, tokens: bytes, chunk_tokens: int, fingerprint: bytes) -> bytes:
    """One digest for each chunk of a segment of KV that was computed with the rotation and behind the tokens that
    `fingerprint` names, and nothing else. The last partial chunk is padded; how many tokens it has is part of its
    name."""
    extras = {0: _SEGMENT + fingerprint}
    count = len(tokens) // TOKEN_BYTES
    last, rest = divmod(count, chunk_tokens)
    if rest:
        extras[last] = extras.get(last, b"") + _TAIL + struct.pack("<I", rest)
        tokens += _PADDING * (chunk_tokens - rest)
    return hasher.chunk_digests(tokens, chunk_tokens, extras=extras)


def prompt_digests(hasher: KeyHasher, tokens: bytes, chunk_tokens: int) -> bytes:
    """The names under which every engine stores a prompt's whole chunks: exact KV."""
    return hasher.chunk_digests(tokens, chunk_tokens)


def final_digests(hasher: KeyHasher, tokens: bytes, chunk_tokens: int, fingerprint: bytes) -> bytes:
    """Names of a blended prompt's whole chunks: near to exact, so never those of a prompt."""
    return hasher.chunk_digests(tokens, chunk_tokens, extras={0: _FINAL + fingerprint})


def unpack(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


class Choice(NamedTuple):
    """The first `prefix` digests of the exact or the final chain, and segments in the order of the prompt."""

    prefix: tuple[bytes, ...] = ()
    exact: bool = True
    segments: tuple[Segment, ...] = ()

    def digests(self) -> list[bytes]:
        """All digests of the choice, each once, in the order of the prompt."""
        return list(dict.fromkeys([*self.prefix, *(each for part in self.segments for each in unpack(part.digests))]))


class Question:
    """The possible hits of one prompt: two chains of its whole chunks, and candidates in any order."""

    def __init__(
        self,
        exact: Sequence[bytes],
        final: Sequence[bytes],
        candidates: Iterable[Segment],
        *,
        chunk_tokens: int,
        most_digests: int,
    ) -> None:
        """At most `most_digests` are asked for. The chains stay within that bound; of the candidates the longest are
        taken."""
        self._chunk_tokens = chunk_tokens
        self._exact, self._final = tuple(exact), tuple(final)
        asked = dict.fromkeys((*self._exact, *self._final))
        self._candidates: list[tuple[Segment, list[bytes]]] = []
        parts: dict[bytes, list[bytes]] = {}
        spans: set[tuple[int, int]] = set()
        for each in sorted(candidates, key=lambda each: (-each.tokens, each.start)):
            if (each.start, each.tokens) in spans:
                continue
            needed = parts.get(each.digests) or unpack(each.digests)
            if each.digests not in parts:
                more = [digest for digest in needed if digest not in asked]
                if len(asked) + len(more) > most_digests:
                    continue
                asked.update(dict.fromkeys(more))
                parts[each.digests] = needed
            spans.add((each.start, each.tokens))
            self._candidates.append((each, needed))
        self.digests = list(asked)

    def choose(self, have: Set[bytes]) -> Choice:
        exact, final = (_length(chain, have) for chain in (self._exact, self._final))
        prefix = self._exact[:exact] if exact >= final else self._final[:final]
        return Choice(prefix, exact >= final, _apart(self._available(have), len(prefix) * self._chunk_tokens))

    def _available(self, have: Set[bytes]) -> Iterable[Segment]:
        whole: dict[bytes, bool] = {}
        for each, needed in self._candidates:
            if each.digests not in whole:
                whole[each.digests] = all(digest in have for digest in needed)
            if whole[each.digests]:
                yield each


def _length(chain: Sequence[bytes], have: Set[bytes]) -> int:
    return next((index for index, digest in enumerate(chain) if digest not in have), len(chain))


def _apart(segments: Iterable[Segment], first: int) -> tuple[Segment, ...]:
    """The segments that begin at `first` or later and overlap no earlier one of `segments`, which are in the order of
    preference."""
    starts: list[int] = []
    chosen: list[Segment] = []
    for each in segments:
        at = bisect_left(starts, each.start)
        before_ends = chosen[at - 1].start + chosen[at - 1].tokens if at else first
        if each.start >= before_ends and (at == len(starts) or each.start + each.tokens <= starts[at]):
            starts.insert(at, each.start)
            chosen.insert(at, each)
    return tuple(chosen)
