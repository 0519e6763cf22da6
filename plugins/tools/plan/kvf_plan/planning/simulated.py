"""A setting's figures, by the simulation of the server that it configures."""

from __future__ import annotations

from collections.abc import Iterator

from kvf_plan.planning.catalogue import Engine
from kvf_plan.planning.goal import Figures
from kvf_plan.planning.offers import Prices
from kvf_plan.planning.prompts import Prompts
from kvf_plan.planning.setting import Setting, config_of
from kvf_plan.simulation import Engines, Outcome, Settings, TierSpeed, simulate
from kvf_plan.trace.form import KVFRAMEWORK, Header, Request

_DAY_S = 86_400.0


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
    tokens = max(outcome.tokens, 1)
    return Figures(
        ttft_s={
            "mean": outcome.ttft_s.mean,
            "p50": outcome.ttft_s.p50,
            "p90": outcome.ttft_s.p90,
            "p99": outcome.ttft_s.p99,
        },
        l1_hit=outcome.l1_tokens / tokens,
        l2_hit=outcome.l2_tokens / tokens,
        engine_s=outcome.engine_s,
        written_per_s=written / seconds,
        read_per_s=sum(tier.read_bytes for tier in outcome.tiers) / seconds,
        busy=max((tier.busy for tier in outcome.tiers), default=0.0),
        dropped=dropped / (written + dropped) if dropped else 0.0,
        l2_used=sum(tier.used_bytes for tier in outcome.tiers),
        drive_writes=written / seconds * _DAY_S / setting.l2_bytes if setting.l2_bytes else 0.0,
        cost=prices.cost(setting.l1_bytes, setting.tier.name if setting.tier else "", setting.l2_bytes),
    )
