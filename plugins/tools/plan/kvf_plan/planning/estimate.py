"""A setting's figures in two ways: an estimate, and the simulation of the server that it configures.

The estimate of the time to the first token, from the LRU stack alone, is coarse, and takes a thousandth of a
simulation's time. It knows neither the server's policies nor what writes do to a tier: it says where simulating is
worth while. Engines compute one prompt at a time, in the order of arrival, and loads come one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import msgspec

from kvf_plan.planning.catalogue import Engine
from kvf_plan.planning.goal import MOST_BUSY, MOST_DROPPED, Figures, Setting, config_of
from kvf_plan.planning.lru_curve import LruCurve
from kvf_plan.planning.offers import Prices
from kvf_plan.planning.prompts import Prompts
from kvf_plan.simulation import Engines, Outcome, Settings, TierSpeed, simulate
from kvf_plan.simulation.requests import spread
from kvf_plan.trace.form import KVFRAMEWORK, Header, Request
from kvframework.pricing import EngineSpeed

_DAY_S = 86_400.0


def estimate(
    prompts: Prompts,
    curve: LruCurve,
    engine: Engine,
    engines: int,
    l1_chunks: int,
    l2_chunks: int = 0,
    bytes_per_s: float = 0.0,
) -> dict[str, float]:
    """Estimate the times to the first token, in seconds, for LRU in L1 and, with `l2_chunks`, in a tier that gets all
    that is stored."""
    free = [0.0] * engines
    chunk_bytes = prompts.chunk_tokens * engine.bytes_per_token
    speed = EngineSpeed(engine.tokens_per_s, engine.attention_tokens)
    channel = 0.0
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
        seconds = speed.prefill_s(known, prompt.tokens)
        first_token = max(heapq.heappop(free), loaded) + seconds
        heapq.heappush(free, first_token)
        ttfts.append(first_token - prompt.at)
    return msgspec.structs.asdict(spread(ttfts))


class Rechunked:
    """Prompts as a trace of their own chunks."""

    def __init__(self, prompts: Prompts) -> None:
        self.header = Header(prompts.chunk_tokens, "plan", KVFRAMEWORK)
        self._prompts = prompts

    def __iter__(self) -> Iterator[Request]:
        for prompt in self._prompts.prompts:
            yield Request(prompt.at, prompt.tokens, 0, prompt.nodes)


def simulated(prompts: Prompts, setting: Setting, engine: Engine, engines: int, prices: Prices) -> Figures:
    """Simulate. Takes about a second for a hundred thousand chunks. Raises the errors of `simulate`."""
    tiers = []
    if setting.tier is not None:
        tiers = [
            TierSpeed(
                setting.tier.kind.plugin,
                setting.tier.read_bytes_per_s,
                setting.tier.write_bytes_per_s,
                latency_s=setting.tier.latency_s,
                capacity_bytes=setting.l2_bytes,
            )
        ]
    outcome = simulate(
        Rechunked(prompts),
        Settings(
            config_of(setting),
            bytes_per_token=engine.bytes_per_token,
            engines=Engines(engines, engine.tokens_per_s, engine.attention_tokens),
            tiers=tiers,
        ),
    )
    return figures(outcome, setting, engine, prices)


def figures(outcome: Outcome, setting: Setting, engine: Engine, prices: Prices) -> Figures:
    """Return what a plan compares of an outcome with engines."""
    if outcome.ttft_s is None or outcome.engine_s is None:
        raise ValueError("simulated without engines")
    seconds = max(outcome.seconds, 1e-9)
    written = sum(tier.written_bytes for tier in outcome.tiers)
    dropped = sum(tier.dropped for tier in outcome.tiers) * setting.chunk_tokens * engine.bytes_per_token
    share = dropped / (written + dropped) if dropped else 0.0
    busy = max((tier.busy for tier in outcome.tiers), default=0.0)
    tokens = max(outcome.tokens, 1)
    return Figures(
        ttft_s=msgspec.structs.asdict(outcome.ttft_s),
        l1_hit=outcome.l1_tokens / tokens,
        l2_hit=outcome.l2_tokens / tokens,
        engine_s=outcome.engine_s,
        written_per_s=written / seconds,
        read_per_s=sum(tier.read_bytes for tier in outcome.tiers) / seconds,
        busy=busy,
        dropped=share,
        l2_used=sum(tier.used_bytes for tier in outcome.tiers),
        drive_writes=written / seconds * _DAY_S / setting.l2_bytes if setting.l2_bytes else 0.0,
        cost=prices.cost(setting.l1_bytes, setting.tier.name if setting.tier else "", setting.l2_bytes),
        saturated=busy > MOST_BUSY or (share > MOST_DROPPED and setting.write_policy != "write_back"),
    )
