"""An estimate of the time to the first token from the LRU stack alone: coarse, and a thousandth of a simulation's time.
Pure.

It knows neither the server's policies nor what writes do to a tier: it says where simulating is worth while. Engines
compute one prompt at a time, in the order of arrival, and loads come one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from statistics import fmean

import msgspec

from kvf_plan.planning.catalogue import Engine
from kvf_plan.planning.lru_curve import LruCurve
from kvf_plan.planning.prompts import Prompts
from kvframework.pricing.prefill import prefill_s


class Estimate(msgspec.Struct, frozen=True):
    """Times to the first token in seconds, `engine_s` of all engines, and shares of the tokens."""

    ttft_s: dict[str, float]
    engine_s: float
    l1_hit: float
    l2_hit: float


def estimate(
    prompts: Prompts,
    curve: LruCurve,
    engine: Engine,
    engines: int,
    l1_chunks: int,
    l2_chunks: int = 0,
    bytes_per_s: float = 0.0,
) -> Estimate:
    """Estimate for LRU in L1 and, with `l2_chunks`, in a tier that gets all that is stored."""
    free = [0.0] * engines
    chunk_bytes = prompts.chunk_tokens * engine.bytes_per_token
    channel = engine_s = 0.0
    l1_tokens = l2_tokens = 0
    ttfts = []
    for index, prompt in enumerate(prompts.prompts):
        hit = in_l1 = curve.hits_of(index, l1_chunks)
        loaded = prompt.at
        if l2_chunks:
            hit = max(in_l1, curve.hits_of(index, l2_chunks))
            if hit > in_l1:
                loaded = channel = max(channel, prompt.at) + (hit - in_l1) * chunk_bytes / bytes_per_s
        # A prompt that is all there is computed in its last chunk still: the first token has to come from somewhere.
        known = min(hit * prompts.chunk_tokens, prompt.tokens - 1)
        seconds = prefill_s(known, prompt.tokens, engine.tokens_per_s, engine.attention_tokens)
        first_token = max(heapq.heappop(free), loaded) + seconds
        heapq.heappush(free, first_token)
        engine_s += seconds
        l1_tokens += in_l1 * prompts.chunk_tokens
        l2_tokens += (hit - in_l1) * prompts.chunk_tokens
        ttfts.append(first_token - prompt.at)
    tokens = max(prompts.tokens, 1)
    return Estimate(spread(ttfts), engine_s, l1_tokens / tokens, l2_tokens / tokens)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles; zeros of nothing."""
    ordered = sorted(seconds) or [0.0]
    at = {name: ordered[min(len(ordered) * share // 100, len(ordered) - 1)] for name, share in _SHARES.items()}
    return {"mean": fmean(ordered), **at}


_SHARES = {"p50": 50, "p90": 90, "p99": 99}
