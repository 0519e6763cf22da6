"""Owns the part `redis`: put and get of the tier plugin beside a bare client, on one server, alternately."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from kvframework.api import ByteSize, Outcome, Tier
from kvframework.bench.attempt import NotMeasured, attempt
from kvframework.bench.bare_redis import BareRedis, bare_client
from kvframework.bench.interleave import Case, interleave, timed
from kvframework.bench.l2.document import RedisFigures, RedisRow
from kvframework.bench.l2.fastest import bare_cases, fastest_way
from kvframework.bench.l2.sizes import Sizes
from kvframework.bench.l2.tier import expect, keys_for, open_tier
from kvframework.bench.progress import Stage
from kvframework.bench.redis_benchmark import benchmark_rates, find_tool
from kvframework.bench.redis_process import running_redis
from kvframework.bench.statistics import Spread, rate_gb_s, ratio
from kvframework.bench.values import Values
from kvframework.registry import PluginRegistry

REACH = 0.9
_DEADLINE_S = 60.0


def bench_redis(
    sizes: Sizes, directory: Path, registry: PluginRegistry, not_measured: list[NotMeasured], stage: Stage
) -> RedisFigures:
    """Raises `BenchUnavailable` without a redis-server or redis-py, `BenchFailed`, and `WrongBytes`."""
    with (
        running_redis(directory) as redis,
        bare_client(redis) as bare,
        open_tier(registry, "redis", {"url": redis.url}) as tier,
    ):
        tool = attempt(not_measured, "redis-benchmark", lambda: find_tool(redis))
        rows = []
        for nbytes in sizes.value_bytes:
            rates: dict[str, Spread] = {}
            if tool is not None:
                with stage(f"redis-benchmark, {ByteSize(nbytes)}", 1) as advance:
                    requests = max(sizes.tool_bytes // nbytes, 1)
                    rates = benchmark_rates(
                        tool, redis, bare, value_bytes=nbytes, requests=requests, runs=sizes.tool_runs
                    )
                    advance()
            rows += _rows(sizes, nbytes, bare, tier, rates, stage)
        return RedisFigures(bare.info(b"server")["redis_version"], rows)


def _rows(
    sizes: Sizes, nbytes: int, bare: BareRedis, tier: Tier, rates: dict[str, Spread], stage: Stage
) -> list[RedisRow]:
    values = Values(nbytes, max(sizes.call_bytes // nbytes, 1))
    keys = keys_for(len(values.sources), b"b")
    calls = _TierCalls(tier, values)
    cases: dict[str, Case] = {"put": calls.put, "get": calls.get}
    cases |= bare_cases("put", lambda under_way: bare.put(keys, values.sources, under_way=under_way))
    cases |= bare_cases("get", lambda under_way: bare.get(keys, values.targets, under_way=under_way))
    bare.put(keys, values.sources)
    calls.put()
    checked: dict[str, Case] = {"the tier": calls.get, "the bare client": partial(bare.get, keys, values.targets)}
    with stage(f"values of {ByteSize(nbytes)} in Redis", sizes.redis_rounds) as advance:
        _verify(values, checked)
        measured = interleave(cases, rounds=sizes.redis_rounds, advance=advance)
        _verify(values, checked)
    bare.delete([*keys, *(b"kvf:" + key for key in calls.keys)])
    rows = []
    for operation in ("put", "get"):
        way, reference = fastest_way(operation, measured)
        rows.append(
            RedisRow(
                operation=operation,
                value_bytes=nbytes,
                nbytes=values.total,
                bare_way=way,
                bare_gb_s=rate_gb_s(values.total, reference),
                tier_gb_s=rate_gb_s(values.total, measured[operation]),
                of_bare=ratio(reference, measured[operation]),
                tool_gb_s=rates.get({"put": "SET", "get": "GET"}[operation]),
                reach=REACH,
            )
        )
    return rows


def _verify(values: Values, ways: dict[str, Case]) -> None:
    for way, get in ways.items():
        values.poison()
        get()
        values.verify(way)


class _TierCalls:
    """One call for all values, as a batch of the server's."""

    def __init__(self, tier: Tier, values: Values) -> None:
        self.keys = keys_for(len(values.sources), b"t")
        self._tier = tier
        self._sources = [[source] for source in values.sources]
        self._targets = [[target] for target in values.targets]

    def put(self) -> float:
        deadline = time.monotonic() + _DEADLINE_S
        return timed(lambda: expect(self._tier.put(self.keys, self._sources, deadline=deadline), Outcome.STORED))

    def get(self) -> float:
        deadline = time.monotonic() + _DEADLINE_S
        return timed(lambda: expect(self._tier.get_into(self.keys, self._targets, deadline=deadline), Outcome.FOUND))
