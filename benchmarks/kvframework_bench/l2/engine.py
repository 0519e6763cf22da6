"""The part `engine`: from Redis into an engine's memory, as on a node that has never seen a prompt.

This process is the engine; server and Redis are others. Needs torch, which is imported when the part runs.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kvframework.client import KVClient
from kvframework.registry import PluginRegistry
from kvframework.wire import messages as m
from kvframework_bench.console import Stage
from kvframework_bench.errors import BenchFailed, require_torch
from kvframework_bench.l2.figures import EngineRow
from kvframework_bench.l2.redis_reference import bare_cases, bare_client, fastest_way
from kvframework_bench.l2.redis_server import running_redis
from kvframework_bench.l2.sizes import Sizes
from kvframework_bench.l2.tier import TIMEOUT_S, Values, await_written, check_plugin, keys_for, redis_settings
from kvframework_bench.rounds import Case, interleave, rate_gb_s, ratio
from kvframework_bench.server import running_server
from kvframework_bench.workload import Shape

if TYPE_CHECKING:
    from kvframework_bench.engine import Transfers

_ARENA_SLACK = 32 << 20
_WAIT_S = 60.0


def bench_engine(sizes: Sizes, directory: Path, registry: PluginRegistry, stage: Stage) -> list[EngineRow]:
    """Measure the loads. Raises `BenchUnavailable` without torch, redis-py or a redis-server, `BenchFailed`, and
    `WrongBytes`."""
    require_torch()
    check_plugin(registry, "tier", "redis")
    return [_row(shape, sizes.engine_rounds, directory, stage) for shape in sizes.shapes]


def _row(shape: Shape, rounds: int, directory: Path, stage: Stage) -> EngineRow:
    from kvframework_bench.engine import PagedMemory, Transfers

    with ExitStack() as stack:
        redis = stack.enter_context(running_redis(directory))
        advance = stack.enter_context(stage(f"from Redis to the engine, {shape.name}", rounds + 2))
        settings = redis_settings(redis.url, timeout_s=TIMEOUT_S)
        server = stack.enter_context(running_server(directory, shape.nbytes + _ARENA_SLACK, settings))
        client = stack.enter_context(server.client())
        memory = PagedMemory(shape, shuffled=True)
        transfers = stack.enter_context(Transfers(client, shape, memory, {}))
        transfers.store()
        await_written(server, client)
        values = Values(transfers.object_bytes, shape.nbytes // transfers.object_bytes)
        bare = stack.enter_context(bare_client(redis))
        keys = keys_for(len(values.sources), b"b")
        bare.put(keys, values.sources)
        loads = _Loads(client, transfers, shape.tokens)
        _verify(loads)
        advance()
        loads.to_l1.clear()
        cases: dict[str, Case] = {"load": loads.load}
        cases |= bare_cases("get", lambda under_way: bare.get(keys, values.targets, under_way=under_way))
        measured = interleave(cases, rounds=rounds, advance=advance)
        to_l1 = [[seconds] for seconds in loads.to_l1]
        values.verify("the bare client")
        _verify(loads)
        advance()
    way, reference = fastest_way("get", measured)
    return EngineRow(
        shape=shape.name,
        object_bytes=values.nbytes,
        nbytes=shape.nbytes,
        verified=True,
        reference=way,
        reference_gb_s=rate_gb_s(shape.nbytes, reference),
        to_l1_gb_s=rate_gb_s(shape.nbytes, to_l1),
        to_engine_gb_s=rate_gb_s(shape.nbytes, measured["load"]),
        ratio_to_reference=ratio(reference, measured["load"]),
    )


def _verify(loads: _Loads) -> None:
    loads.transfers.memory.poison()
    loads.load()
    loads.transfers.memory.verify()


class _Loads:
    """LOOKUP, polls and RETRIEVE of a prompt that only Redis has. `to_l1` are the seconds until LOOKUP's hit was
    pinned."""

    def __init__(self, client: KVClient, transfers: Transfers, tokens: int) -> None:
        self.transfers = transfers
        self.to_l1: list[float] = []
        self._client = client
        self._tokens = tokens
        self._scheduler = transfers.scheduler()

    def load(self) -> float:
        """Return the seconds of one load. Raises `BenchFailed` unless Redis had all of it and L1 nothing."""
        cleared = self._client.request("CLEAR", m.Clear(), m.Cleared)
        if cleared.in_use:
            raise BenchFailed(f"{cleared.in_use} objects are in use before a lookup")
        started = time.perf_counter()
        asked = self._scheduler.lookup(self.transfers.request)
        found = self._scheduler.wait(asked, _WAIT_S)
        self.to_l1.append(time.perf_counter() - started)
        if asked.hit_tokens or found.hit_tokens != self._tokens:
            raise BenchFailed(
                f"a lookup found {asked.hit_tokens} tokens in L1 and {found.hit_tokens} in all",
                available=f"0 and {self._tokens} were expected",
            )
        self.transfers.retrieve()
        seconds = time.perf_counter() - started
        self._scheduler.free(found)
        return seconds
