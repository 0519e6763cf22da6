"""The bare RESP client and the Redis of a bench, for real."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvframework_bench.errors import BenchFailed, BenchUnavailable, WrongBytes
from kvframework_bench.l2.redis import benchmark_rates, find_tool
from kvframework_bench.l2.redis_reference import BareRedis, bare_client
from kvframework_bench.l2.redis_server import RedisChild, running_redis
from kvframework_bench.l2.tier import Values
from kvframework_bench.process import scratch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis


@pytest.fixture
def redis() -> Iterator[RedisChild]:
    with scratch() as directory, running_redis(directory) as redis:
        yield redis
    assert not Path(f"/proc/{redis.pid}").exists()


@pytest.fixture
def bare(redis: RedisChild) -> Iterator[BareRedis]:
    with bare_client(redis) as bare:
        yield bare


@pytest.mark.parametrize("under_way", [1, 2, 9])
def test_values_come_back_as_they_went(bare: BareRedis, under_way: int) -> None:
    values = Values(300_001, 5)
    keys = [b"key %d" % index for index in range(5)]
    assert bare.put(keys, values.sources, under_way=under_way) > 0
    with pytest.raises(WrongBytes, match="nothing"):
        values.verify("nothing")
    assert bare.get(keys, values.targets, under_way=under_way) > 0
    values.verify("the bare client")
    assert bare.stored_bytes() == values.total
    bare.delete(keys)
    assert bare.stored_bytes() == 0


def test_another_answer_ends_a_bench(bare: BareRedis) -> None:
    values = Values(1000, 1)
    bare.put([b"key"], [values.sources[0][:999]])
    with pytest.raises(BenchFailed, match=r"\$999"):
        bare.get([b"key"], values.targets)


def test_a_redis_that_died_is_told_with_its_log(redis: RedisChild, bare: BareRedis) -> None:
    redis.kill()
    with pytest.raises(BenchFailed, match="redis") as failed:
        bare.get([b"key"], [memoryview(bytearray(10))])
    assert "the end of its log" in failed.value.hint


def test_a_stalled_redis_is_ended_all_the_same(redis: RedisChild) -> None:
    redis.stall()
    stat = Path(f"/proc/{redis.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", 10, "the stop")


def test_redis_benchmark_takes_its_key_with_it(redis: RedisChild, bare: BareRedis) -> None:
    try:
        tool = find_tool(redis)
    except BenchUnavailable as error:
        pytest.skip(error.fact)
    rates = benchmark_rates(tool, redis, bare, value_bytes=100_000, requests=3, runs=2)
    assert all(0 < rates[verb].min <= rates[verb].max for verb in ("SET", "GET"))
    assert bare.stored_bytes() == 0
    assert bare.info(b"server")["redis_version"]


def test_a_tool_that_fails_is_no_figure(redis: RedisChild, bare: BareRedis, tmp_path: Path) -> None:
    tool = tmp_path / "redis-benchmark"
    tool.write_text("#!/bin/sh\necho no luck\n")
    os.chmod(tool, 0o700)
    with pytest.raises(BenchFailed, match="no luck"):
        benchmark_rates(tool, redis, bare, value_bytes=10, requests=1, runs=1)
