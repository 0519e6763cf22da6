"""What a trace holds, in numbers that need no cache to be known. One pass; memory for each chunk that differs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvf_plan.trace.form import UNKNOWN, Request
from kvf_plan.trace.live_set import LiveCount


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
