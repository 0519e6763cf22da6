"""What a trace holds, in numbers that need no cache to be known, with its live set: the chunks that will be asked for
again. One pass; memory for each chunk that differs. Pure.

A policy that knew the future would need as much as the live set and no more; below it every policy loses hits that it
could have.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from kvf_plan.trace.form import UNKNOWN, Request


class LiveSet(msgspec.Struct, frozen=True):
    """Counts of chunks: `most` that will be asked for again, at most at once, `at` seconds; `reused` that ever were,
    `stored` that were ever seen; `hits` of `uses` in an endless cache."""

    most: int
    at: float
    reused: int
    stored: int
    uses: int
    hits: int


class LiveCount:
    """The count of a live set, one request after the other. Keeps an entry of a dict for each chunk that differs, and
    16 bytes a request."""

    def __init__(self) -> None:
        # By chunk, the number of the last request that used it; its complement if that was the first one.
        self._last: dict[int, int] = {}
        self._at = array("d")
        # By request, how many chunks begin to be worth keeping with it, less those that are no more.
        self._worth = array("q")
        self._uses = self._reused = 0

    def add(self, at: float, chunks: Iterable[int]) -> None:
        """Count the chunks of the next request."""
        number, last, worth = len(self._worth), self._last, self._worth
        self._at.append(at)
        worth.append(0)
        for chunk in chunks:
            self._uses += 1
            before = last.get(chunk)
            if before is None:
                last[chunk] = ~number
                continue
            if before < 0:
                before = ~before
                self._reused += 1
            worth[before] += 1
            worth[number] -= 1
            last[chunk] = number

    def found(self) -> LiveSet:
        """Return the live set of all requests so far."""
        live = most = 0
        at = 0.0
        for when, change in zip(self._at, self._worth, strict=True):
            live += change
            if live > most:
                most, at = live, when
        return LiveSet(most, at, self._reused, len(self._last), self._uses, self._uses - len(self._last))


class Summary(msgspec.Struct, frozen=True):
    """`span_s` is the time from the first request to the last. `asked_tokens` are those that the engines did not have
    themselves. `chunks` counts every use, `unique_chunks` each chunk once; the chunks that came again are the most that
    any cache could have had. `live_chunks` is the least number that has to be kept to have them all: those that will be
    asked for again, when they are most. `hit_tokens` is what the recorded server had, `UNKNOWN` if no request says so.
    `lost` requests are missing."""

    requests: int
    span_s: float
    tokens: int
    asked_tokens: int
    output_tokens: int
    chunks: int
    unique_chunks: int
    live_chunks: int
    hit_tokens: int
    tenants: int
    models: int
    lost: int


def summarise(requests: Iterable[Request]) -> Summary:
    """Return the numbers of a trace. Raises what reading it does."""
    count = tokens = asked_tokens = output_tokens = lost = hit_tokens = 0
    span_s = 0.0
    said = False
    tenants, models = set(), set()
    counted = LiveCount()
    for request in requests:
        count += 1
        span_s = request.at
        tokens += request.tokens
        asked_tokens += request.tokens - request.start
        output_tokens += request.output_tokens
        lost += request.lost
        tenants.add(request.tenant)
        models.add(request.model)
        if request.hit_tokens != UNKNOWN:
            said = True
            hit_tokens += request.hit_tokens
        counted.add(request.at, request.chunks)
    live = counted.found()
    return Summary(
        count,
        span_s,
        tokens,
        asked_tokens,
        output_tokens,
        live.uses,
        live.stored,
        live.most,
        hit_tokens if said else UNKNOWN,
        len(tenants),
        len(models),
        lost,
    )
