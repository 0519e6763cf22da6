"""What a trace holds, in numbers that need no cache to be known. One pass; memory for each chunk that differs."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from kvframework.trace.form import UNKNOWN, Request


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
    count = tokens = asked_tokens = output_tokens = chunks = lost = hit_tokens = 0
    span_s = 0.0
    said = False
    tenants, models = set(), set()
    last: dict[int, int] = {}
    # By request, how many chunks begin to be worth keeping with it, less those that are no more.
    worth = array("q")
    for number, request in enumerate(requests):
        worth.append(0)
        count += 1
        span_s = request.at
        tokens += request.tokens
        asked_tokens += request.tokens - request.start
        output_tokens += request.output_tokens
        chunks += len(request.chunks)
        lost += request.lost
        tenants.add(request.tenant)
        models.add(request.model)
        if request.hit_tokens != UNKNOWN:
            said = True
            hit_tokens += request.hit_tokens
        for chunk in request.chunks:
            before = last.get(chunk)
            if before is not None:
                worth[before] += 1
                worth[number] -= 1
            last[chunk] = number
    live = most = 0
    for change in worth:
        live += change
        most = max(most, live)
    return Summary(
        count,
        span_s,
        tokens,
        asked_tokens,
        output_tokens,
        chunks,
        len(last),
        most,
        hit_tokens if said else UNKNOWN,
        len(tenants),
        len(models),
        lost,
    )
