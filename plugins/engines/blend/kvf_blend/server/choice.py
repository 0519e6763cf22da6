"""The choice of hits: the parts of a prompt to load, given the available chunks. Pure; runs in the server's worker and
storage threads.

The prefix goes first: the longer of the exact one and the one of an earlier blend, the exact one if they are equal. Of
the segments behind it, and apart from each other, the longest is taken first, of equal ones the leftmost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from kvf_blend.messages import Segment
from kvf_blend.server.digests import unpack


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
