"""Figures of a setting from a part of a trace's sessions, in a part of the time. Pure.

What is found, read and written comes out within a point or two. Times to the first token do not: waves of load are as
high in a sample, but shorter. So they are multiplied by what the estimate, which costs nothing, says of the whole trace
and of the sample at the same hit rate.
"""

from __future__ import annotations

import msgspec

from kvf_plan.planning.catalogue import Engine
from kvf_plan.planning.estimate import estimate
from kvf_plan.planning.goal import Figures
from kvf_plan.planning.lru_curve import LruCurve, lru_curve
from kvf_plan.planning.offers import Prices
from kvf_plan.planning.prompts import Prompts, sampled
from kvf_plan.planning.setting import Setting
from kvf_plan.planning.simulated import simulated

# Uses of chunks that are enough to compare settings by; less than twice as many are not worth a sample.
_ENOUGH = 80_000


class Sample(msgspec.Struct, frozen=True):
    """A part of the sessions, about `share` of them, beside all of them."""

    share: float
    whole: Prompts
    whole_curve: LruCurve
    part: Prompts
    part_curve: LruCurve

    def simulated(self, setting: Setting, engine: Engine, engines: int, prices: Prices) -> Figures:
        """Return about what the simulation of all sessions would. Blocks for its share of that time."""
        scaled = msgspec.structs.replace(
            setting, l1_bytes=round(setting.l1_bytes * self.share), l2_bytes=round(setting.l2_bytes * self.share)
        )
        found = simulated(self.part, scaled, engine, engines, prices)
        expected = self._waits(self.whole, self.whole_curve, found.hit, engine, engines)
        of_part = self._waits(self.part, self.part_curve, found.hit, engine, engines)
        tier = setting.tier.name if setting.tier is not None else ""
        return msgspec.structs.replace(
            found,
            ttft_s={at: seconds * expected[at] / max(of_part[at], 1e-9) for at, seconds in found.ttft_s.items()},
            engine_s=found.engine_s * self.whole.tokens / max(self.part.tokens, 1),
            l2_used=round(found.l2_used / self.share),
            drive_writes=found.drive_writes * self.share,
            cost=prices.cost(setting.l1_bytes, tier, setting.l2_bytes),
        )

    @staticmethod
    def _waits(prompts: Prompts, curve: LruCurve, hit: float, engine: Engine, engines: int) -> dict[str, float]:
        chunks = curve.chunks_for(hit)
        return estimate(prompts, curve, engine, engines, len(curve.hits) if chunks is None else chunks).ttft_s


def sample_of(prompts: Prompts, curve: LruCurve) -> Sample | None:
    """Return a sample, None if the trace is small."""
    uses = prompts.uses
    if uses < 2 * _ENOUGH:
        return None
    share = _ENOUGH / uses
    part = sampled(prompts, share)
    return Sample(share, prompts, curve, part, lru_curve(part)) if part.uses else None
