"""Settings of docs/load-or-recompute.md, by the server's own code under virtual time.

`python benchmarks/load_or_recompute.py TRACE [NAME ...]` prints the mean time to the first token: priced, with all
loaded, with nothing loaded, and with everything loaded from a constant number of tokens on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from kvf_plan.simulation import Engines, Settings, SlowTime, TierSpeed, simulate
from kvf_plan.trace.reading import open_trace
from kvframework.config.load import load_config
from kvframework.pricing import Priced
from kvframework.service.pricing import Pricing
from kvframework.service.records import PendingLookup
from kvframework.storage.l2.sealed_tier import L2Store

CHUNK = 512
L1_CHUNKS = 1000
THRESHOLDS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
# Tokens a second, the context at which a token takes twice as long, bytes of a token, engines; and GB/s.
MODELS = {
    "8B x2": (25_000.0, 29_500.0, 131_072, 2),
    "8B x3": (25_000.0, 29_500.0, 131_072, 3),
    "8B x5": (25_000.0, 29_500.0, 131_072, 5),
    "70B x4": (20_000.0, 51_000.0, 327_680, 4),
    "V3 x2": (40_000.0, 54_500.0, 70_272, 2),
}
# Two engines for this trace have a long queue, in which prompts are looked up near their turn.
LOOKAHEAD = {"8B x2": 8}
# A tier that falls to a fifth of its speed for ten minutes.
FALLS = {"8B x3": ((3, 600.0), (3, 1800.0)), "8B x5": ((10, 1800.0),), "70B x4": ((10, 1800.0),)}
NAMES = {
    **{f"{model} {rate}": (model, rate, ()) for model in MODELS for rate in (1, 3, 10)},
    "70B x4 30": ("70B x4", 30, ()),
    **{
        f"{model} {rate} falls at {at:.0f} s": (model, rate, (SlowTime(at, at + 600.0, 0.2),))
        for model, falls in FALLS.items()
        for rate, at in falls
    },
}


def mean_s(trace: Path, name: str, *, price: bool, loads: bool = True) -> float:
    """Return the mean time to the first token."""
    model, rate, slow = NAMES[name]
    tokens_per_s, attention, token_bytes, engines = MODELS[model]
    overrides = [
        f"server.chunk_size={CHUNK}",
        f"server.price={str(price).lower()}",
        f"l1.capacity={L1_CHUNKS * CHUNK * token_bytes}",
        "l1.eviction.use=lru",
    ]
    tiers = []
    if loads:
        overrides += ["l2.0.use=filesystem", "l2.0.path=/nowhere", "l2.0.capacity=1GiB", "l2.0.timeout_s=86400"]
        tiers = [TierSpeed("filesystem", rate * 1e9, slow=slow, has_all=True)]
    settings = Settings(
        load_config(None, overrides),
        token_bytes,
        Engines(engines, tokens_per_s, attention, LOOKAHEAD.get(model)),
        tiers,
        whole_chunks=False,
    )
    outcome = simulate(open_trace(trace), settings)
    assert outcome.ttft_s is not None
    return outcome.ttft_s.mean


def threshold_s(trace: Path, name: str, tokens: int) -> float:
    """Return the same of a server that loads everything, if it is at least so many tokens."""

    def located(_self: Pricing, asked: PendingLookup, here: Sequence[bool], source: Mapping[int, L2Store]) -> None:
        grid = asked.grid
        assert grid is not None
        l1, found = grid.hit(here), grid.hit([there or index in source for index, there in enumerate(here)])
        if 0 < (found - l1) * CHUNK < tokens:
            asked.priced = Priced(l1, found, 0.0, 0.0, 0.0)

    with patch.object(Pricing, "located", located):
        return mean_s(trace, name, price=True)


def main() -> None:
    trace = Path(sys.argv[1])
    for name in sys.argv[2:] or NAMES:
        print(name, "priced", round(mean_s(trace, name, price=True), 3), flush=True)
        print(name, "always", round(mean_s(trace, name, price=False), 3), flush=True)
        print(name, "never", round(mean_s(trace, name, price=False, loads=False), 3), flush=True)
        for tokens in THRESHOLDS:
            print(name, f"from {tokens} tokens", round(threshold_s(trace, name, tokens), 3), flush=True)


if __name__ == "__main__":
    main()
