"""The part `new`: LOOKUP of a prompt that begins as one in L1 and goes on as none that an idle Redis has, beside a bare
question to the tier and a server without any L2."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from kvframework.api.tier import Outcome, Tier
from kvframework.client import RequestHashes
from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage
from kvframework_bench.errors import BenchFailed
from kvframework_bench.l2.figures import NewRow
from kvframework_bench.l2.redis_server import running_redis
from kvframework_bench.l2.sizes import Sizes
from kvframework_bench.l2.tier import TIMEOUT_S, await_written, expect, open_tier, redis_settings
from kvframework_bench.prefix import Prefixes, token_ids
from kvframework_bench.rounds import Case, Latency, Spread, interleave, ratio
from kvframework_bench.server import running_server

_ARENA_BYTES = 64 << 20
_HELD_S = 1.0
_KEY_BYTES = 72


def bench_new_prompts(sizes: Sizes, directory: Path, registry: PluginRegistry, stage: Stage) -> list[NewRow]:
    """Measure lookups. Raises `BenchUnavailable` without redis-py or a redis-server, and `BenchFailed`, also if a
    lookup finds more or less than the half of its prompt that is in L1."""
    homes = [directory / name for name in ("without", "behind")]
    for home in homes:
        home.mkdir()
    with ExitStack() as stack:
        redis = stack.enter_context(running_redis(directory))
        tier = stack.enter_context(open_tier(registry, "redis", {"url": redis.url}))
        servers = [
            stack.enter_context(running_server(home, _ARENA_BYTES, settings))
            for home, settings in zip(homes, ([], redis_settings(redis.url, timeout_s=TIMEOUT_S)), strict=True)
        ]
        clients = [stack.enter_context(server.client()) for server in servers]
        without, behind = (Prefixes(client) for client in clients)
        for each in (without, behind):
            each.store(each.request(token_ids(max(sizes.lookup_tokens) // 2, known=True)))
        await_written(servers[1], clients[1])
        cases: dict[str, Case] = {}
        for tokens in sizes.lookup_tokens:
            prompts = [_prompts(each, tokens) for each in (without, behind)]
            cases[f"tier {tokens}"] = _question(tier, tokens // 2 // behind.chunk_tokens)
            cases[f"without {tokens}"] = _lookup(without, prompts[0], tokens // 2)
            cases[f"new {tokens}"] = _lookup(behind, prompts[1], tokens // 2)
            same = itertools.repeat(next(prompts[1]))
            cases[f"again {tokens}"] = _lookup(behind, same, tokens // 2)
        with stage("looking up what Redis lacks", sizes.lookup_rounds) as advance:
            # One call each: new prompts come one by one, and find processes that sleep.
            measured = interleave(cases, rounds=sizes.lookup_rounds, advance=advance)
    return [_row(tokens, *(measured[f"{name} {tokens}"] for name in _CASES)) for tokens in sizes.lookup_tokens]


_CASES = ("tier", "without", "new", "again")


def _row(
    tokens: int,
    tier: list[list[float]],
    without: list[list[float]],
    new: list[list[float]],
    again: list[list[float]],
) -> NewRow:
    added = [(median(a) - median(b)) / median(c) for a, b, c in zip(new, without, tier, strict=True)]
    return NewRow(
        tokens=tokens,
        tier=Latency.of(tier),
        without_l2=Latency.of(without),
        new=Latency.of(new),
        again=Latency.of(again),
        ratio_to_tier=ratio(new, tier),
        added_to_tier=Spread.of(added),
        target_ratio=2.0,
    )


def _prompts(prefixes: Prefixes, tokens: int) -> Iterator[RequestHashes]:
    """Prompts whose first half is known, each with another second half."""
    known = token_ids(tokens // 2, known=True)
    for number in itertools.count(1):
        yield prefixes.request(known + [number * tokens + index for index in range(tokens // 2)])


def _question(tier: Tier, keys: int) -> Case:
    def run() -> float:
        asked = [os.urandom(_KEY_BYTES) for _ in range(keys)]
        started = time.perf_counter()
        found = tier.contains(asked, deadline=started + TIMEOUT_S)
        seconds = time.perf_counter() - started
        expect(found, Outcome.MISSING)
        return seconds

    return run


def _lookup(prefixes: Prefixes, prompts: Iterator[RequestHashes], expected: int) -> Case:
    scheduler = prefixes.scheduler()

    def run() -> float:
        prompt = next(prompts)
        started = time.perf_counter()
        found = scheduler.lookup(prompt, wait_s=_HELD_S)
        seconds = time.perf_counter() - started
        scheduler.free(found)
        if found.pending or found.hit_tokens != expected or scheduler.failures:
            raise BenchFailed(f"a lookup found {found.hit_tokens} tokens", available=f"{expected} tokens")
        return seconds

    return run
