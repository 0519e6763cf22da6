"""The priced server under virtual time, by the code that serves: no worse than loading all or nothing where engines are
busy, and far better where a tier falls to a fifth of its speed."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import pytest

from kvf_plan.simulation import Engines, Settings, SlowTime, TierSpeed, simulate
from kvf_plan.trace.form import MOONCAKE, Header, Request
from kvframework.config.load import load_config
from kvframework.registry.registry import PluginRegistry

CHUNK = 512
BYTES_PER_TOKEN = 128 << 10
REQUESTS, SECONDS = 400, 200.0
# Llama-3-8B on an H100.
TOKENS_PER_S, ATTENTION_TOKENS = 25_000.0, 29_500.0


class Conversations:
    """Requests that each go on with one of some conversations, or begin another one."""

    header = Header(CHUNK, "made", MOONCAKE)

    def __iter__(self) -> Iterator[Request]:
        random_ = random.Random(7)
        ids = iter(range(1 << 20))
        going: list[list[int]] = []
        at = 0.0
        for _ in range(REQUESTS):
            at += random_.expovariate(REQUESTS / SECONDS)
            if not going or random_.random() < 0.3:
                going.append([next(ids) for _ in range(random_.randint(2, 30))])
            chunks = random_.choice(going)
            chunks.extend(next(ids) for _ in range(random_.randint(1, 8)))
            if len(chunks) > 120:
                going.remove(chunks)
            yield Request(at, len(chunks) * CHUNK - random_.randint(1, CHUNK - 1), 0, tuple(chunks))


@functools.cache
def registry() -> PluginRegistry:
    return PluginRegistry()


def mean_s(*settings: str, engines: int, slow: tuple[SlowTime, ...] = (), gb_per_s: float = 0.0) -> float:
    """Return the mean time to the first token; without a speed there is no tier."""
    tier = ("l2.0.use=filesystem", "l2.0.path=/nowhere", "l2.0.capacity=1GiB", "l2.0.timeout_s=86400")
    config = load_config(
        None,
        (
            f"l1.capacity={300 * CHUNK * BYTES_PER_TOKEN}",
            f"server.chunk_size={CHUNK}",
            *settings,
            *(tier if gb_per_s else ()),
        ),
    )
    speeds = [TierSpeed("filesystem", gb_per_s * 1e9, slow=slow, has_all=True)] if gb_per_s else []
    fleet = Engines(engines, TOKENS_PER_S, ATTENTION_TOKENS)
    outcome = simulate(
        Conversations(), Settings(config, BYTES_PER_TOKEN, fleet, speeds, whole_chunks=False), registry()
    )
    return outcome.ttft_s.mean


@pytest.mark.parametrize("gb_per_s", [1.0, 3.0, 10.0])
def test_it_is_better_than_all_or_nothing_where_engines_are_busy(gb_per_s: float) -> None:
    priced = mean_s("server.price=true", engines=2, gb_per_s=gb_per_s)
    always = mean_s("server.price=false", engines=2, gb_per_s=gb_per_s)
    assert priced <= 1.02 * min(always, mean_s(engines=2))


def test_a_tier_that_falls_to_a_fifth_costs_little() -> None:
    slow = (SlowTime(60.0, 150.0, 0.2),)
    priced = mean_s("server.price=true", engines=3, slow=slow, gb_per_s=3.0)
    always = mean_s("server.price=false", engines=3, slow=slow, gb_per_s=3.0)
    assert priced < always / 2
